"""INT4: blocks of 32 4-bit codes with one scale; value = (code - 8) * scale. Registered in `registry`.

Put together by `packings` from what compressed-tensors, AWQ and GPTQ store. A group of 128 inputs is four
blocks of one scale. Invariant: nothing is rounded: `dequantize` gives the float32 products of code and scale.

Bytes of a block: scale in float32 (4), codes (16): first 16 inputs in the low halves, last 16 in the high.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, write_nibbles
from firstlight.quant.scaled import float_at, scaled_values, with_half_scales
from firstlight.quant.weight import Affine, Weight


class Int4:
    """See the module."""

    halved_format = "Q4_0"

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["INT4"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return scaled_values(weight, self.geometry, _read)

    def affine(self, weight: Weight) -> Affine:
        blocks = blocks_of(weight, self.geometry)
        codes = torch.empty(*blocks.shape[:2], 32, dtype=torch.uint8)
        write_nibbles(blocks[..., 4:], codes)
        scale = float_at(blocks, 0)
        return Affine(codes.view(weight.shape), scale, scale * -8.0)

    def half_blocks(self, weight: Weight) -> torch.Tensor:
        """The blocks of Q4_0: scales rounded to float16, codes as they are."""
        return with_half_scales(blocks_of(weight, self.geometry))


def int4_blocks(codes_NK: torch.Tensor, *numbers_NB: torch.Tensor) -> torch.Tensor:
    """Raw blocks of codes (uint8, 0 to 15) and of one or two float32 numbers for each 32 of them."""
    groups = codes_NK.unflatten(1, (-1, 2, 16))
    packed = groups[:, :, 0] | groups[:, :, 1] << 4
    numbers = torch.stack([number.float() for number in numbers_NB], -1)
    return torch.cat((numbers.view(torch.uint8), packed), -1).flatten(1)


def _read(blocks: torch.Tensor, out: torch.Tensor) -> None:
    write_nibbles(blocks[..., 4:], out)
    out.sub_(8.0)
