"""Prompt lookup: what followed the last time that the text ended as it ends now.

A drafter without a model (see `Drafter`), good where answers repeat what was said: code, lists, quotations,
summaries. `drafter.chain` measures it as a baseline. Invariant: the work of a proposal is bounded, however
long the sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.draft_memory import memory_of

SHORTEST_MATCH = 2  # of one token, almost any place matches and nothing follows from it
LONGEST_MATCH = 8  # a longer one is no better a guess
MAX_LOOKBACK = 16_384  # tokens that are searched, from the end


class NgramDrafter:
    """See the module. Of the longest matches the latest one counts."""

    name = "ngram"
    is_model = False
    layers = ()

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Nothing: it looks at tokens alone."""

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        """See `Drafter`."""
        return [continuation(_history(sequence), num) for sequence in sequences]


def continuation(tokens: np.ndarray, num: int) -> list[int]:
    """The `num` tokens that followed the longest earlier match of the end of `tokens`; none without one.

    Where the match reaches to the end, the text is taken to go round in its own period.
    """
    tokens = tokens[-MAX_LOOKBACK:]
    end = len(tokens) - 1
    if end < SHORTEST_MATCH:
        return []
    places, length = np.flatnonzero(tokens[:end] == tokens[end]), 1
    while length < LONGEST_MATCH:
        earlier = places[places >= length]
        longer = earlier[tokens[earlier - length] == tokens[end - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    if not len(places) or length < SHORTEST_MATCH:
        return []
    first = int(places[-1]) + 1
    drafts: list[int] = tokens[first : first + num].tolist()
    while len(drafts) < num:
        drafts.append(drafts[len(drafts) - (end + 1 - first)])
    return drafts


class _History:
    """A sequence's tokens as an array that grows with it."""

    def __init__(self) -> None:
        self._array = np.empty(256, np.int64)
        self._num = 0

    def latest(self, tokens: list[int]) -> np.ndarray:
        num = len(tokens)
        if num > len(self._array):
            array = np.empty(2 * num, np.int64)
            array[: self._num] = self._array[: self._num]
            self._array = array
        self._array[self._num : num] = tokens[self._num :]
        self._num = num
        return self._array[:num]


def _history(sequence: Sequence) -> np.ndarray:
    memory = memory_of(sequence)
    if not isinstance(memory.own, _History):
        memory.own = _History()
    return memory.own.latest(sequence.tokens)
