"""The contract of products whose weight depends on the row: of groups of rows, and of heads.

Beside `contract`, whose backends make them; `grouped`, `heads` and `cpu.experts` are what there is.
Invariant: a row has the bits that its group's own product gives it, where the backend is row-invariant.
"""

from __future__ import annotations

from typing import Protocol

import torch

from firstlight.ops.matrix import Matrix


class GroupedLinearOp(Protocol):
    """y = x W_g^T with a weight for each group: the experts of a layer, or heads. G groups, R rows."""

    @property
    def num_bytes(self) -> int:
        """Resident."""
        ...

    def put(self, group: int, weight: Matrix) -> None:
        """Lays out the weight of a group, once. All groups agree in format and shape."""
        ...

    def __call__(self, x_RI: torch.Tensor, starts_G1: torch.Tensor) -> torch.Tensor:
        """Float32 [R, O]. Rows `starts[g]` to `starts[g + 1]` belong to group g; the last start is R.

        Only groups that have rows are read. `starts` lies on the host.
        """
        ...


class ExpertLayerOp(Protocol):
    """The routed experts of a layer: each token's are chosen, and what they give is weighed and added up."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        scores_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
    ) -> torch.Tensor:
        """This rank's share of the sum, float32 [T, H]. `scores`: the router's, float32."""
        ...


class HeadsOp(Protocol):
    """y = x W_n^T with a weight [O, I] for each head n."""

    @property
    def num_bytes(self) -> int:
        """Resident."""
        ...

    def __call__(self, x_TNI: torch.Tensor) -> torch.Tensor:
        """[T, N, O] in the layout's own type."""
        ...

    def back(self, x_TO: torch.Tensor) -> torch.Tensor | None:
        """x W_n of rows that all heads share, [T, N, I]; None from backends that are row-invariant."""
        ...
