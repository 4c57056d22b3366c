"""Q4_1: blocks of 32 4-bit codes with a float16 scale and minimum; value = code * scale + minimum.

Registered in `registry`. Invariant: `dequantize` equals the gguf package bit for bit.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, halves, row_pieces, write_nibbles
from firstlight.quant.weight import Affine, Weight


class Q4_1:
    """Bytes of a block: scale (2), minimum (2), packed codes (16)."""

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["Q4_1"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32, dtype=torch.float32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            write_nibbles(blocks[piece, :, 4:], out)
            # Two operations, not a fused one: the product is rounded before the sum, as everywhere else.
            out.mul_(halves(blocks[piece], 0).unsqueeze(-1)).add_(halves(blocks[piece], 2).unsqueeze(-1))
        return values.view(weight.shape)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        codes = torch.empty(*blocks.shape[:2], 32, dtype=torch.uint8)
        write_nibbles(blocks[..., 4:], codes)
        return Affine(codes.view(weight.shape), halves(blocks, 0), halves(blocks, 2))
