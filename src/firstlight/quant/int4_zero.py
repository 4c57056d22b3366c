"""INT4_ZERO: blocks of 32 4-bit codes, a scale and a zero point; value = (code - zero) * scale.

Registered in `registry`, put together by `packings` from asymmetric checkpoints. Invariant: `dequantize`
gives the float32 products of the difference, a whole number, and the scale.

Bytes of a block: scale (4) and zero point (4) in float32, codes (16) as in INT4.
"""

from __future__ import annotations

import torch

from firstlight.facts.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, row_pieces, write_nibbles
from firstlight.quant.int4 import as_half, float_at
from firstlight.quant.weight import Affine, Weight


class Int4Zero:
    """See the module."""

    halved_format = None  # like Q4_1, but with zero points instead of minima

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT4_ZERO"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            write_nibbles(blocks[piece, :, 8:], out)
            out.sub_(float_at(blocks[piece], 4)[..., None]).mul_(float_at(blocks[piece], 0)[..., None])
        return values.view(weight.shape)

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
