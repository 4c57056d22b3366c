"""RMS norm over all heads of the queries together, and over all of the keys (MiniMax-M2).

Used by `attention`. Where heads are shared out, the ranks add up their squares first. Invariant: a rank gets
for its heads what a single rank would get, up to the rounding of that sum.

Shapes: T tokens, N query heads and K KV heads of this rank, D head size.
"""

from __future__ import annotations

import torch

from firstlight.models.declare import Declaration
from firstlight.models.layers.linear import Vector


class WholeNorm:
    """`bounds`: this rank's heads of the queries, and of the keys; `interleave` as in `linear.Part`."""

    def __init__(
        self,
        declare: Declaration,
        prefix: str,
        num_heads: tuple[int, int],
        bounds: tuple[tuple[int, int], tuple[int, int]],
        interleave: tuple[int, int],
    ) -> None:
        self._ops, self._group, self._name = declare.ops, declare.group, f"{prefix}.norm"
        size = interleave[0]
        self._bounds = [(first * size, last * size) for first, last in bounds]
        self._widths = [num * size for num in num_heads]
        self._weights = [
            Vector(declare, f"{prefix}.{name}_norm.weight", width, interleave)
            for name, width in zip("qk", self._widths, strict=True)
        ]

    def __call__(self, turned_TND: torch.Tensor, eps: float) -> torch.Tensor:  # noqa: N803 - shape suffix
        """Queries and then keys [T, N + K, D], normalised."""
        flat = turned_TND.flatten(1)
        parts = flat.split([last - first for first, last in self._bounds], -1)
        weights = [w.values[slice(*bounds)] for w, bounds in zip(self._weights, self._bounds, strict=True)]
        if self._group.size == 1:
            normed = [self._ops.rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
        else:
            squares = torch.stack([part.square().sum(-1) for part in parts], -1)
            means = self._group.all_reduce(self._name, squares) / torch.tensor(
                self._widths, device=flat.device
            )
            scales = torch.rsqrt(means + eps).split(1, -1)
            normed = [x * scale * w for x, scale, w in zip(parts, scales, weights, strict=True)]
        return torch.cat(normed, -1).view_as(turned_TND)
