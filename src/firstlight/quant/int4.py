"""INT4: blocks of 32 4-bit codes with one scale; value = (code - 8) * scale. Registered in `registry`.

Put together by `packings` from what compressed-tensors, AWQ and GPTQ store. A group of 128 inputs is four
blocks of one scale. Invariant: nothing is rounded: `dequantize` gives the float32 products of code and scale.

Bytes of a block: scale in float32 (4), codes (16): first 16 inputs in the low halves, last 16 in the high.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import UnsupportedError
from firstlight.facts.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, row_pieces, write_nibbles
from firstlight.quant.weight import Affine, Weight

LARGEST_HALF = 65504.0


class Int4:
    """See the module."""

    halved_format = "Q4_0"

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT4"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        values = torch.empty(rows, num_blocks, 32)
        for piece in row_pieces(rows, num_blocks * 32):
            out = values[piece]
            write_nibbles(blocks[piece, :, 4:], out)
            out.sub_(8.0).mul_(float_at(blocks[piece], 0)[..., None])
        return values.view(weight.shape)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        codes = torch.empty(*blocks.shape[:2], 32, dtype=torch.uint8)
        write_nibbles(blocks[..., 4:], codes)
        scale = float_at(blocks, 0)
        return Affine(codes.view(weight.shape), scale, scale * -8.0)

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """The blocks of Q4_0: scales rounded to float16, codes as they are."""
        blocks = blocks_of(weight, self.geometry)
        return torch.cat((as_half(float_at(blocks, 0)), blocks[..., 4:]), -1).flatten(1)


def float_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float32 at byte `start` of each block [N, B]."""
    return blocks[..., start : start + 4].contiguous().view(torch.float32).squeeze(-1)


def as_half(numbers_NB: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffix
    """The bytes of float16 numbers [N, B, 2]. Raises `UnsupportedError` for one that is too large."""
    if float(numbers_NB.abs().max()) > LARGEST_HALF:
        raise UnsupportedError(
            f"the scale of a weight is larger than float16 can hold ({LARGEST_HALF:.0f})",
            "Serve this model with --dtype float32.",
        )
    return numbers_NB.half()[..., None].view(torch.uint8)


def int4_blocks(codes_NK: torch.Tensor, *numbers_NB: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shapes
    """Raw blocks of codes (uint8, 0 to 15) and of one or two float32 numbers for each 32 of them."""
    groups = codes_NK.unflatten(1, (-1, 2, 16))
    packed = groups[:, :, 0] | groups[:, :, 1] << 4
    numbers = torch.stack([number.float() for number in numbers_NB], -1)
    return torch.cat((numbers.view(torch.uint8), packed), -1).flatten(1)
