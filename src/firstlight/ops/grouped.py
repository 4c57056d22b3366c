"""Products with the weights of groups, one ordinary product for each group that has rows.

What backends without an operator of their own inherit from `expert_layer.ByOperators`, and the meaning of
correct. Invariant: a row's bits are those that its group's own product gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from firstlight.ops.contract import LinearOp
from firstlight.ops.matrix import Matrix


class GroupByGroup:
    """See `contract.GroupedLinearOp`. `lay_out` makes the operator of one group."""

    def __init__(self, num_groups: int, lay_out: Callable[[Matrix], LinearOp]) -> None:
        self._lay_out = lay_out
        self._groups: list[LinearOp | None] = [None] * num_groups
        self._num_outputs = 0

    @property
    def num_bytes(self) -> int:
        return sum(op.num_bytes for op in self._groups if op is not None)

    def put(self, group: int, weight: Matrix) -> None:
        self._groups[group] = self._lay_out(weight)
        self._num_outputs = weight.shape[0]

    def __call__(self, x_RI: torch.Tensor, starts_G1: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x_RI), self._num_outputs, device=x_RI.device)
        for op, (first, last) in zip(self._groups, pairwise(starts_G1.tolist()), strict=True):
            if last > first:
                assert op is not None, "a product before the weights are there"
                out[first:last] = op(x_RI[first:last])
        return out
