"""A weight as operators are given it: the checkpoint's own blocks, whose values can be asked for.

Part of the operators' contract; `models.layers.linear.StoredMatrix` is one over raw blocks. Invariant:
nothing has been rounded.

Shapes: O outputs and I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Matrix(Protocol):
    """A weight in the checkpoint's own blocks, whose values can be asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...

    @property
    def order(self) -> torch.Tensor | None:
        """Which input each column of `stored` and `affine` is for, int64 [I]; None where all are in place."""
        ...

    def dequantize(self) -> torch.Tensor:
        """The exact values, float32 [O, I]; every column in its place."""
        ...

    def stored(self) -> torch.Tensor | None:
        """The blocks as they are in the file, uint8 [O, bytes of a row]; None where there is no file.

        Scales in float32 (INT4) are rounded to float16 here: these are blocks for a fast layout.
        """
        ...

    def first_rows(self, num_rows: int) -> Matrix:
        """The same weight with at most `num_rows` outputs, for looking at a sample."""
        ...

    def affine(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Codes [O, I], scale, offset [O, I / 32]: value = code * scale + offset; None if not so."""
        ...

    def nested(self) -> NestedScales | None:
        """The numbers of a format of nested scales; None for others."""
        ...


@dataclass(frozen=True)
class NestedScales:
    """A matrix whose scales are products.

    value = (scale * sub_scales) * codes - (minimum_scale * sub_minima).

    Codes [O, I]; sub-scales and sub-minima, whole numbers of 8 bits, for each 16 or 32 inputs; the floats for
    each 256, exact in float16.
    """

    codes: torch.Tensor
    sub_scales: torch.Tensor
    sub_minima: torch.Tensor | None
    scale: torch.Tensor
    minimum_scale: torch.Tensor | None
