"""Products with a matrix of its own for each head, which latent attention needs.

Backends give one of the two for `Backend.heads_linear`. Invariant of `HeadsByGroup`: a row's bits do not
depend on the number of rows, where the grouped product promises that.

Shapes: T tokens, N heads, O outputs and I inputs of a head, G groups = N, R rows = N * T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.ops.groups import GroupedLinearOp
from firstlight.ops.matrix import Matrix


class HeadsByGroup:
    """See `contract.HeadsOp`: each head is a group that all tokens go to."""

    def __init__(self, grouped: GroupedLinearOp, weights: Sequence[Matrix]) -> None:
        self.grouped = grouped
        for head, weight in enumerate(weights):
            grouped.put(head, weight)

    @property
    def num_bytes(self) -> int:
        return self.grouped.num_bytes

    def __call__(self, x_TNI: torch.Tensor) -> torch.Tensor:
        num_tokens, num_heads, _ = x_TNI.shape
        x_RI = x_TNI.transpose(0, 1).flatten(0, 1)
        starts = torch.arange(num_heads + 1) * num_tokens
        return self.grouped(x_RI, starts).unflatten(0, (num_heads, num_tokens)).transpose(0, 1)

    def back(self, x_TO: torch.Tensor) -> None:
        return None


class HeadsByBatch:
    """See `contract.HeadsOp`: one batched product of dense weights [N, O, I]."""

    def __init__(self, weights: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> None:
        self._weight_NOI = torch.stack([weight.dequantize().to(dtype) for weight in weights]).to(device)

    @property
    def num_bytes(self) -> int:
        return self._weight_NOI.nbytes

    def __call__(self, x_TNI: torch.Tensor) -> torch.Tensor:
        x_NTI = x_TNI.transpose(0, 1).to(self._weight_NOI.dtype)
        return torch.bmm(x_NTI, self._weight_NOI.transpose(1, 2)).transpose(0, 1)

    def back(self, x_TO: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x_TO.to(self._weight_NOI.dtype), self._weight_NOI).transpose(0, 1)
