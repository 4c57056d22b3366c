"""What the sampler asks of rows of logits: the largest of each, or the first so many of some.

Invariant: of equal values the lower token id comes first, and a row that holds a NaN has NaN as its largest.

Shapes: L rows, V vocabulary, R chosen rows, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Selection(Protocol):
    """The rows are float32, one after the other in memory."""

    def largest(self, logits_LV: torch.Tensor) -> tuple[list[float], list[int]]:
        """The largest value of each row, and its token id."""
        ...

    def first(
        self, logits_LV: torch.Tensor, rows: Sequence[int], divisors: Sequence[float], num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `num` largest of each of `rows` divided by its divisor: values and ids [R, C], falling."""
        ...


class TorchSelection:
    """See `Selection`; on any device."""

    def largest(self, logits_LV: torch.Tensor) -> tuple[list[float], list[int]]:
        values, ids = logits_LV.max(-1)
        return values.tolist(), ids.tolist()

    def first(
        self, logits_LV: torch.Tensor, rows: Sequence[int], divisors: Sequence[float], num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits_LV[list(rows)] / torch.tensor(divisors, device=logits_LV.device)[:, None]
        if num == logits_LV.shape[1]:
            values, ids = scaled.sort(dim=-1, descending=True, stable=True)
            return values, ids
        values, ids = scaled.topk(num, -1)
        # `topk` may take any of several that equal the last one: those are put in order by themselves.
        tied = (scaled == values[:, -1:]).sum(-1) > (values == values[:, -1:]).sum(-1)
        for row in tied.nonzero()[:, 0].tolist():
            _, order = scaled[row].sort(descending=True, stable=True)
            ids[row] = order[:num]
        ids = ids.sort(-1).values
        values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        return values, ids.gather(1, order)
