"""INT4_ZERO: blocks of 32 4-bit codes, a scale and a zero point; value = (code - zero) * scale.

Registered in `registry`, put together by `packings` from asymmetric checkpoints. Invariant: `dequantize`
gives the float32 products of the difference, a whole number, and the scale.

Bytes of a block: scale (4) and zero point (4) in float32, codes (16) as in INT4.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, write_nibbles
from firstlight.quant.scaled import as_half, float_at, scaled_values
from firstlight.quant.weight import Affine, Weight


class Int4Zero:
    """See the module."""

    halved_format = None  # like Q4_1, but with zero points instead of minima

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT4_ZERO"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return scaled_values(weight, self.geometry, _read)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        codes = torch.empty(*blocks.shape[:2], 32, dtype=torch.uint8)
        write_nibbles(blocks[..., 8:], codes)
        scale = float_at(blocks, 0)
        return Affine(codes.view(weight.shape), scale, scale * -float_at(blocks, 4))

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """Scale and zero point in float16 (4 bytes), then the codes."""
        blocks = blocks_of(weight, self.geometry)
        numbers = (as_half(float_at(blocks, start)) for start in (0, 4))
        return torch.cat((*numbers, blocks[..., 8:]), -1).flatten(1)


def _read(blocks: torch.Tensor, out: torch.Tensor) -> None:
    write_nibbles(blocks[..., 8:], out)
    out.sub_(float_at(blocks, 4)[..., None])
