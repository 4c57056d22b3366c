"""Where a sequence's tokens and drafts lie, as drafters with keys and values of their own see it.

Such a drafter has a slot for each slot of the target's pages, and scratch slots behind them for drafts, which
are nobody's tokens yet. It attends by tables of slots, as if pages held one token. Invariant: a slot of the
pages is written for a computed token alone.

Shapes: B sequences, L slots of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from firstlight.engine.scheduler.sequence import Sequence


def slots_of(pages: Rows[int], num_tokens: int, page_size: int) -> np.ndarray:
    """Slots of the first tokens of a sequence with these pages."""
    firsts = np.array(pages[: -(-num_tokens // page_size)], np.int64) * page_size
    every: np.ndarray = (firsts[:, None] + np.arange(page_size)).ravel()[:num_tokens]
    return every


class Places:
    """`num_slots` of the pages, and behind them `num_drafts` for each of some sequences."""

    def __init__(self, num_slots: int, num_drafts: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_slots, self._num_drafts = num_slots, num_drafts

    def scratch(self, row: int) -> np.ndarray:
        """The slots for drafts of the sequence in row `row` of a proposal."""
        first = self.num_slots + row * self._num_drafts
        return np.arange(first, first + self._num_drafts)

    def table(self, sequences: Rows[Sequence], skipped: int) -> np.ndarray:
        """int64 [B, L]: slots of each sequence's computed tokens but the first `skipped`, then its scratch.

        Every token but the last is computed. What is behind is 0.
        """
        lengths = [len(sequence.tokens) - 1 for sequence in sequences]
        table_BL = np.zeros((len(sequences), max(lengths) - skipped + self._num_drafts), np.int64)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            known = slots_of(sequence.pages, length, self.page_size)
            table_BL[row, : length - skipped] = known[skipped:]
            table_BL[row, length - skipped : length - skipped + self._num_drafts] = self.scratch(row)
        return table_BL

    def lasts(self, sequences: Rows[Sequence]) -> np.ndarray:
        """int64 [B]: slots of the last computed tokens."""
        size = self.page_size
        lasts = [(sequence.pages, len(sequence.tokens) - 2) for sequence in sequences]
        return np.array([pages[last // size] * size + last % size for pages, last in lasts])
