"""A weight as the checkpoint stores it: the raw blocks, with their format and shape.

Invariant: `raw` holds the file's own bytes (rows in Hugging Face order), or those of several tensors put
together to blocks by `packings`; nothing has been rounded yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from firstlight.facts.checkpoint.formats import BlockGeometry


@dataclass(frozen=True)
class Weight:
    """`shape` is (N, K) or (N,); `raw` is uint8 [N, row_bytes], for a vector [1, row_bytes]; contiguous.

    `order`, int64 [K]: which column of the matrix each column of the blocks is, where they are sorted by
    group (GPTQ's desc_act); None where they are as they are.
    """

    format: str
    shape: tuple[int, ...]
    raw: torch.Tensor
    order: torch.Tensor | None = None

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


@dataclass(frozen=True)
class Nested:
    """A format of nested scales as numbers, none of them rounded; B blocks of 256 values a row.

    value = (scale * sub_scales) * codes - (minimum_scale * sub_minima). `codes` [N, K]; `sub_scales` and
    `sub_minima` whole numbers of 8 bits, one for each 16 or 32 values; `scale` and `minimum_scale` float32
    [N, B], whose values float16 holds.
    """

    codes: torch.Tensor
    sub_scales: torch.Tensor
    sub_minima: torch.Tensor | None
    scale: torch.Tensor
    minimum_scale: torch.Tensor | None


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


class HalvedFormat(BlockFormat, Protocol):
    """A format with float32 scales, whose blocks can be had with scales in float16."""

    @property
    def halved_format(self) -> str | None:
        """Whose blocks those are; None where no format of GGUF is so."""
        ...

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """Blocks of a GGUF format, uint8 [N, bytes]: scales rounded to float16, codes as they are."""
        ...


class NestedFormat(WeightFormat, Protocol):
    """A format of blocks whose scales are products of a float and a small whole number."""

    def nested(self, weight: Weight) -> Nested:
        """The weight's numbers; new tensors. Only for (N, K) weights."""
        ...
