"""INT8: blocks of 32 8-bit codes with one scale; value = code * scale. Registered in `registry`.

Put together by `packings` from W8A8 checkpoints, whose scale is one for a whole row, or for all. Invariant:
nothing is rounded. Bytes of a block: scale in float32 (4), codes (32).
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of
from firstlight.quant.scaled import float_at, scaled_values, with_half_scales
from firstlight.quant.weight import Affine, Weight


class Int8:
    """See the module."""

    halved_format = "Q8_0"

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT8"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return scaled_values(weight, self.geometry, _read)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        scale = float_at(blocks, 0)
        codes = blocks[..., 4:].contiguous().view(torch.int8).view(weight.shape)
        return Affine(codes, scale, torch.zeros_like(scale))

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """The blocks of Q8_0: scales rounded to float16, codes as they are."""
        return with_half_scales(blocks_of(weight, self.geometry))


def _read(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[..., 4:].view(torch.int8))
