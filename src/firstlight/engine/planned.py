"""From the sequences that run to the plan that the ranks get. Called by the scheduler; pure.

Invariant: a sequence gets a row of logits for its last token, and for each of its drafts.
"""

from __future__ import annotations

from firstlight.engine.memory import Changes
from firstlight.engine.plan import StepPlan
from firstlight.engine.request import Sequence

Entries = list[tuple[Sequence, int]]  # who runs, and how many of its tokens and drafts


def build_plan(step: int, entries: Entries, changes: Changes) -> tuple[StepPlan, list[Sequence]]:
    """The plan, and the sequences that get tokens by it, in the order of its samples."""
    slots: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    samples: list[int] = []
    sampled: list[Sequence] = []
    trees: list[tuple[int, list[int]]] = []
    for sequence, num in entries:
        start = sequence.num_computed
        slots.append(sequence.slot)
        starts.append(start)
        counts.append(num)
        if num == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens.extend(sequence.tokens[start : start + num])
        if sequence.drafts:
            if sequence.parents:
                trees.append((len(slots) - 1, sequence.parents))
            first = len(tokens) - 1
            tokens.extend(sequence.drafts)
            samples.extend(range(first, len(tokens)))
            sampled.append(sequence)
        elif start + num == len(sequence.tokens):
            samples.append(len(tokens) - 1)
            sampled.append(sequence)
    plan = StepPlan(step, slots, starts, counts, tokens, samples, changes.pages, trees, changes.moves)
    return plan, sampled
