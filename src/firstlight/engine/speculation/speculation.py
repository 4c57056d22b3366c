"""Drafting in the engine's step: who gets how many drafts, and what came of them.

`propose` comes before a step is planned, `record` after it was applied. Invariant: while no drafts are made,
a step pays for one choice and nothing by sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from time import perf_counter

from firstlight.engine.messages import SequenceOutput
from firstlight.engine.sampling.rule import Rule
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.draft_memory import MAX_MISSES, MAX_MISSES_OF_MODEL, memory_of
from firstlight.engine.speculation.drafter import Drafter, Tree, TreeDrafter
from firstlight.engine.speculation.metrics import DraftCounts
from firstlight.engine.speculation.policy import Policy
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.speculation.synthetic import Synthetic
from firstlight.engine.speculation.tree import depths, first_path, path_of


class Speculation:
    """See the module. `rule`: how drafts are accepted; None: by the keyed rule."""

    def __init__(self, drafter: Drafter, policy: Policy, rule: Rule | None = None) -> None:
        self.drafter, self.policy, self.rule = drafter, policy, rule
        largest = policy.largest
        self.counts = DraftCounts(drafter.name, policy.most, top_k=largest.top_k, most_nodes=largest.nodes)
        self._propose_s = 0.0
        self._max_misses = MAX_MISSES_OF_MODEL if drafter.is_model else MAX_MISSES

    def begin(self, times_s: Mapping[int, float]) -> None:
        """The engine serves from now on: drafts may be made."""
        self.counts.forget()
        self.policy.begin(times_s)
        self._tell()

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """A step of these sequences has run; its tokens are not yet chosen."""
        if self.drafter.layers:
            self.drafter.observe(plan, sequences)

    def propose(self, sequences: Rows[Sequence]) -> None:
        """Gives drafts to sequences whose next step makes a token."""
        self._propose_s = 0.0
        if not sequences:
            return  # what was chosen last is still what is told
        shape = self.policy.choose(len(sequences))
        self._tell()
        if not shape.depth:
            return
        started_s = perf_counter()
        asked = [s for s in sequences if self._is_open(s)]
        answered = self._trees(asked, shape) if shape.is_tree else self._chains(asked, shape.depth)
        self._propose_s = perf_counter() - started_s
        self.counts.propose_s += self._propose_s
        self.policy.record_draft_time(shape, len(sequences), self._propose_s)
        self.policy.acceptance.record_coverage(len(sequences), answered)

    def record(self, sequences: Rows[Sequence], outputs: Rows[SequenceOutput]) -> None:
        """What a step gave to the sequences that got tokens."""
        for sequence, output in zip(sequences, outputs, strict=True):
            drafted, accepted = output.num_drafted, output.num_accepted
            memory, depth = memory_of(sequence) if drafted else None, drafted
            if memory is not None:
                if memory.tree is None:
                    self.policy.record(drafted, accepted)
                else:
                    depth = self._record_tree(memory.tree, output)
                memory.record(accepted, sequence.num_tokens, self._max_misses)
            is_hit = sequence.num_cached > 0
            self.counts.record(drafted, accepted, sequence.num_tokens, is_hit=is_hit, depth=depth)

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """Where accepted drafts of trees go, before anything is drafted from them."""
        if from_slots and isinstance(self.drafter, TreeDrafter):
            self.drafter.moved(from_slots, to_slots)

    def record_time(self, num_rows: int, step_s: float) -> None:
        """A step without prompts took so long, the drafter's time included."""
        if self.policy.times is not None:
            self.policy.times.record(num_rows, step_s - self._propose_s)

    def _tell(self) -> None:
        """What was chosen last stands in the counts."""
        counts, policy = self.counts, self.policy
        counts.now, counts.nodes_now, counts.reason = policy.chosen.depth, policy.chosen.nodes, policy.reason

    def _chains(self, asked: list[Sequence], num: int) -> int:
        """How many of the sequences got any."""
        answered = 0
        for sequence, drafts in zip(asked, self.drafter.propose(asked, num), strict=True):
            if isinstance(self.rule, Synthetic):
                drafts.extend([sequence.tokens[-1]] * (num - len(drafts)))
            sequence.drafts = drafts
            memory_of(sequence).tree = None
            answered += len(drafts) > 0
        return answered

    def _trees(self, asked: list[Sequence], shape: Shape) -> int:
        """The same with trees."""
        assert isinstance(self.drafter, TreeDrafter), "trees of a drafter that makes none"
        answered = 0
        for sequence, tree in zip(asked, self.drafter.propose_trees(asked, shape), strict=True):
            sequence.drafts, sequence.parents = memory_of(sequence).tree = tree
            answered += len(sequence.drafts) > 0
        return answered

    def _record_tree(self, tree: Tree, output: SequenceOutput) -> int:
        """Tells the policy of a tree as it was verified; how deep it was."""
        drafts, parents = tree
        path = path_of(drafts, parents, output.token_ids[: output.num_accepted])
        self.policy.record_tree(len(drafts), path, first_path(parents))
        return max(depths(parents))

    def _is_open(self, sequence: Sequence) -> bool:
        return not self.policy.adapts or memory_of(sequence).resume_at <= sequence.num_tokens
