"""Q4_0: blocks of 32 4-bit codes with one float16 scale; value = (code - 8) * scale. Registered in
`registry`.

Invariant: `dequantize` equals the gguf package bit for bit.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, halves, row_pieces, write_nibbles
from firstlight.quant.weight import Affine, Weight


class Q4_0:
    """Bytes of a block: scale (2), packed codes (16)."""

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["Q4_0"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32, dtype=torch.float32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            write_nibbles(blocks[piece, :, 2:], out)
            out.sub_(8.0).mul_(halves(blocks[piece], 0).unsqueeze(-1))
        return values.view(weight.shape)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        codes = torch.empty(*blocks.shape[:2], 32, dtype=torch.uint8)
        write_nibbles(blocks[..., 2:], codes)
        scale = halves(blocks, 0)
        return Affine(codes.view(weight.shape), scale, scale * -8.0)
