"""A sequence as it will be once its first drafts are accepted: the history of a later row of a step.

Made by `engine.choosing` for the sampler. Invariant: nothing is copied until it is asked for.
"""

from __future__ import annotations

from collections import Counter

from firstlight.engine.params import SamplingParams
from firstlight.engine.request import Sequence


class Ahead:
    """See `sampler.History`. `num` drafts of `sequence` count as its output."""

    __slots__ = ("_num", "_sequence")

    def __init__(self, sequence: Sequence, num: int) -> None:
        self._sequence, self._num = sequence, num

    @staticmethod
    def of(sequence: Sequence, num: int) -> Sequence | Ahead:
        """The sequence itself where no draft counts."""
        return Ahead(sequence, num) if num else sequence

    @property
    def params(self) -> SamplingParams:
        return self._sequence.params

    @property
    def end_ids(self) -> frozenset[int]:
        return self._sequence.end_ids

    @property
    def num_tokens(self) -> int:
        return self._sequence.num_tokens + self._num

    @property
    def num_output(self) -> int:
        return self._sequence.num_output + self._num

    @property
    def tokens(self) -> list[int]:
        return self._sequence.tokens + self._sequence.drafts[: self._num]

    @property
    def output_counts(self) -> Counter[int] | None:
        counts = self._sequence.output_counts
        return None if counts is None else counts + Counter(self._sequence.drafts[: self._num])
