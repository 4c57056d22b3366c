"""INT8: blocks of 32 8-bit codes with one scale; value = code * scale. Registered in `registry`.

Put together by `packings` from W8A8 checkpoints, whose scale is one for a whole row, or for all. Invariant:
nothing is rounded. Bytes of a block: scale in float32 (4), codes (32).
"""

from __future__ import annotations

import torch

from firstlight.facts.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, row_pieces
from firstlight.quant.int4 import as_half, float_at
from firstlight.quant.weight import Affine, Weight


class Int8:
    """See the module."""

    halved_format = "Q8_0"

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT8"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            out.copy_(blocks[piece, :, 4:].view(torch.int8))
            out.mul_(float_at(blocks[piece], 0)[..., None])
        return values.view(weight.shape)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        scale = float_at(blocks, 0)
        codes = blocks[..., 4:].contiguous().view(torch.int8).view(weight.shape)
        return Affine(codes, scale, torch.zeros_like(scale))

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """The blocks of Q8_0: scales rounded to float16, codes as they are."""
        blocks = blocks_of(weight, self.geometry)
        return torch.cat((as_half(float_at(blocks, 0)), blocks[..., 4:]), -1).flatten(1)


def scaled_blocks(codes: torch.Tensor, scales_NB: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shapes
    """Raw blocks that begin with a float32 scale; `codes` [N, bytes of all codes] of one byte each."""
    grouped = codes.contiguous().view(torch.uint8).unflatten(1, (scales_NB.shape[1], -1))
    return torch.cat((scales_NB.float()[..., None].view(torch.uint8), grouped), -1).flatten(1)
