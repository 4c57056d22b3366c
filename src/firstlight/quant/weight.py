"""A weight as the checkpoint stores it: the raw blocks, with their format and shape.

Made by `loading.reader`, turned into a fast layout by `ops` and `models.layers`. Invariant: `raw` holds the
file's own bytes (rows in Hugging Face order), so nothing has been rounded yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from firstlight.facts.formats import BlockGeometry


@dataclass(frozen=True)
class Weight:
    """`shape` is (N, K) or (N,); `raw` is uint8 [N, row_bytes], for a vector [1, row_bytes]; contiguous."""

    format: str
    shape: tuple[int, ...]
    raw: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the raw blocks."""
        return self.raw.numel()

    @property
    def num_values(self) -> int:
        """Values the blocks stand for."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Affine:
    """A block format as numbers: value = codes * scale + offset, all three without rounding.

    `codes` uint8 or int8 [N, K]; `scale` and `offset` float32 [N, K / block_values], one pair a block.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


class WeightFormat(Protocol):
    """What the bytes of one format mean."""

    @property
    def geometry(self) -> BlockGeometry:
        """Sizes of its blocks."""
        ...

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """The exact values, float32 in the weight's shape; a new tensor."""
        ...


class BlockFormat(WeightFormat, Protocol):
    """A format of blocks with codes, a scale and perhaps an offset."""

    def affine(self, weight: Weight) -> Affine:
        """The weight's codes, scales and offsets; new tensors. Only for (N, K) weights."""
        ...
