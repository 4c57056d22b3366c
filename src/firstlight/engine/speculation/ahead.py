"""A sequence as it will be once some drafts are accepted: the history of a later row of a step.

Made by `engine.choosing` for the sampler and for rules. Invariant: nothing is copied until it is asked for.
"""

from __future__ import annotations

from collections import Counter

from firstlight.engine.params import SamplingParams
from firstlight.engine.request import Sequence


class Ahead:
    """See `sampler.History`. `drafts` that were accepted count as output of `sequence`."""

    __slots__ = ("_drafts", "_sequence")

    def __init__(self, sequence: Sequence, drafts: list[int]) -> None:
        self._sequence, self._drafts = sequence, drafts

    @staticmethod
    def of(sequence: Sequence, drafts: list[int]) -> Sequence | Ahead:
        """The sequence itself where no draft counts."""
        return Ahead(sequence, drafts) if drafts else sequence

    @property
    def params(self) -> SamplingParams:
        return self._sequence.params

    @property
    def end_ids(self) -> frozenset[int]:
        return self._sequence.end_ids

    @property
    def num_tokens(self) -> int:
        return self._sequence.num_tokens + len(self._drafts)

    @property
    def num_output(self) -> int:
        return self._sequence.num_output + len(self._drafts)

    @property
    def tokens(self) -> list[int]:
        return self._sequence.tokens + self._drafts

    @property
    def output_counts(self) -> Counter[int] | None:
        counts = self._sequence.output_counts
        return None if counts is None else counts + Counter(self._drafts)
