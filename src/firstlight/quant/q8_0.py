"""Q8_0: blocks of 32 int8 codes with one float16 scale; value = code * scale. Registered in `registry`.

Invariant: `dequantize` equals the gguf package bit for bit.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, halves, row_pieces
from firstlight.quant.weight import Affine, Weight


class Q8_0:
    """Bytes of a block: scale (2), codes (32)."""

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["Q8_0"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32, dtype=torch.float32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            out.copy_(blocks[piece, :, 2:].view(torch.int8))
            out.mul_(halves(blocks[piece], 0).unsqueeze(-1))
        return values.view(weight.shape)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        scale = halves(blocks, 0)
        codes = blocks[..., 2:].contiguous().view(torch.int8).view(weight.shape)
        return Affine(codes, scale, torch.zeros_like(scale))


def as_q8_0(values_OI: torch.Tensor) -> Weight:
    """A matrix rounded to this format: the largest value of a block becomes 127 or -127."""
    outputs, inputs = values_OI.shape
    blocks = values_OI.detach().float().reshape(outputs, inputs // 32, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127.0).half()
    codes = (blocks / scales.float().clamp(min=1e-12)).round().clamp(-127, 127).to(torch.int8)
    raw = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1)
    return Weight("Q8_0", (outputs, inputs), raw.flatten(1).contiguous())
