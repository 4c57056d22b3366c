"""A small model with the target's tokenizer as the drafter, in the process of rank 0.

See `Drafter`; made by `draft_model_load`. It has keys and values of its own under the numbers of the target's
pages, and runs only when it drafts: first over the tokens that it has not seen, then a token a draft. So it
costs nothing while no drafts are made, and afterwards once what was left out. Invariant: a slot of the pages
has keys of the text of its page; drafts and the last token have theirs in scratch slots.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.draft_kv_index import Held
from firstlight.engine.speculation.guess import Guess
from firstlight.engine.speculation.places import Places
from firstlight.engine.worker.model_runner import ModelRunner
from firstlight.ops.selection import Selection


class DraftModelDrafter:
    """See the module. `runner` takes tables of pages of one token; `vocab_sizes`: the target's, its own.

    `budget`: most tokens that it runs over at once.
    """

    name = "draft-model"
    is_model = True
    layers = ()

    def __init__(
        self,
        runner: ModelRunner,
        places: Places,
        selection: Selection,
        vocab_sizes: tuple[int, int],
        budget: int,
    ) -> None:
        self._runner, self._places, self._selection = runner, places, selection
        self._held = Held(places.page_size)
        self._vocab_size, self._own_size = vocab_sizes
        self._guess = Guess(torch.arange(self._vocab_size, dtype=torch.int32))
        self._budget = budget

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Nothing: it looks at tokens alone."""

    @torch.inference_mode()
    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        """See `Drafter`."""
        if not sequences:
            return []
        tables = self._places.table(sequences, skipped=0).tolist()
        lasts = [len(sequence.tokens) - 1 for sequence in sequences]
        firsts = [self._catch_up(s, row, tables[row], len(sequences)) for row, s in enumerate(sequences)]
        fresh = [s.tokens[first:] for s, first in zip(sequences, firsts, strict=True)]
        logits = self._run(firsts, fresh, [(row, 0, table) for row, table in enumerate(tables)])
        for sequence, first, last in zip(sequences, firsts, lasts, strict=True):
            self._held.written(sequence, first, last)
        made = [self._choose(logits, sequences, 0)]
        for place in range(1, num):
            starts = [last + place for last in lasts]
            logits = self._run(starts, [[token] for token in made[-1]], [])
            made.append(self._choose(logits, sequences, place))
        return [list(drafts) for drafts in zip(*made, strict=True)]

    def _catch_up(self, sequence: Sequence, row: int, table: list[int], num_sequences: int) -> int:
        """Runs over what it has not seen, but for the last few tokens; gives the first that is left."""
        first, last = self._held.count(sequence), len(sequence.tokens) - 1
        few = self._budget // num_sequences - 1
        while last - first > few:
            end = min(first + self._budget, last)
            plan = StepPlan(
                0, [row], [first], [end - first], sequence.tokens[first:end], [], [(row, 0, table)]
            )
            self._runner.run(self._known(plan))
            self._held.written(sequence, first, end)
            first = end
        return first

    def _run(
        self, starts: list[int], tokens: list[list[int]], changes: list[tuple[int, int, list[int]]]
    ) -> torch.Tensor:
        """Logits after the last of each sequence's tokens [B, V]."""
        counts = [len(mine) for mine in tokens]
        flat = [token for mine in tokens for token in mine]
        samples = (np.cumsum(counts) - 1).tolist()
        plan = StepPlan(0, list(range(len(starts))), starts, counts, flat, samples, changes)
        return self._runner.run(self._known(plan))[:, : self._vocab_size]

    def _known(self, plan: StepPlan) -> StepPlan:
        """Tokens behind its own vocabulary, which no text has, are some other to it."""
        if self._own_size < self._vocab_size:
            plan.tokens = [min(token, self._own_size - 1) for token in plan.tokens]
        return plan

    def _choose(self, logits_BV: torch.Tensor, sequences: Rows[Sequence], place: int) -> list[int]:
        if self._own_size > self._vocab_size:
            logits_BV = logits_BV.contiguous()
        best = np.array(self._selection.largest(logits_BV)[1])
        self._guess.improve(best, logits_BV, sequences, place)
        tokens: list[int] = best.tolist()
        return tokens
