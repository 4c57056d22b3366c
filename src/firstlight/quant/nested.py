"""Q4_K and Q6_K: blocks of 256 values whose sub-blocks have scales that are small whole numbers themselves.

Registered in `registry`. A block has one float16 that its sub-scales are multiplied with. Invariant:
`dequantize` equals the gguf package bit for bit, and `nested` rounds nothing.

Shapes: N rows, B blocks a row, K = 256 B values a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.blocks import blocks_of, halves, row_pieces
from firstlight.quant.weight import Nested, Weight


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Four 2-bit codes of each byte, one after the other in a new dimension before the last."""
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -2)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -2)


class Q4_K:
    """Bytes of a block: scale (2), scale of the minima (2), 6-bit sub-scales and -minima (12), codes (128).

    value = (scale * sub_scale) * code - (minimum_scale * sub_minimum), for each 32 values.
    """

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["Q4_K"]

    def nested(self, weight: Weight) -> Nested:
        blocks = blocks_of(weight, self.geometry)
        rows = blocks.shape[0]
        low, middle, high = blocks[..., 4:16].view(*blocks.shape[:2], 3, 4).unbind(2)
        sub_scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 0x30)], -1)
        sub_minima = torch.cat([middle & 63, (high >> 4) | (middle >> 2 & 0x30)], -1)
        codes = _nibbles(blocks[..., 16:].view(*blocks.shape[:2], 4, 32))
        return Nested(
            codes.reshape(rows, -1),
            sub_scales.reshape(rows, -1),
            sub_minima.reshape(rows, -1),
            halves(blocks, 0),
            halves(blocks, 2),
        )

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return _dequantize(self, weight)


class Q6_K:
    """Bytes of a block: lower 4 bits (128), upper 2 bits (64), int8 sub-scales (16), scale (2).

    value = (scale * sub_scale) * code, for each 16 values; codes from -32 to 31.
    """

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["Q6_K"]

    def nested(self, weight: Weight) -> Nested:
        blocks = blocks_of(weight, self.geometry)
        rows, num_blocks, _ = blocks.shape
        lower = _nibbles(blocks[..., :128].view(rows, num_blocks, 2, 64)).view(rows, num_blocks, 2, 128)
        upper = _two_bits(blocks[..., 128:192].view(rows, num_blocks, 2, 32)).view(rows, num_blocks, 2, 128)
        codes = (lower | upper << 4).view(torch.int8) - 32
        sub_scales = blocks[..., 192:208].contiguous().view(torch.int8)
        return Nested(codes.reshape(rows, -1), sub_scales.reshape(rows, -1), None, halves(blocks, 208), None)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return _dequantize(self, weight)


@dataclass(frozen=True)
class _Piece:
    """Some rows as floats: what the codes are multiplied with, and what is subtracted."""

    scale: torch.Tensor
    minimum: torch.Tensor | None


def _dequantize(weight_format: Q4_K | Q6_K, weight: Weight) -> torch.Tensor:
    """Scales and minima are exact products; a value is rounded after the product, and after the sum."""
    rows = weight.raw.shape[0]
    out = torch.empty(rows, weight.num_values // rows)
    for piece in row_pieces(rows, out.shape[1]):
        raw = weight.raw[piece]
        nested = weight_format.nested(Weight(weight.format, (len(raw), out.shape[1]), raw))
        floats = _floats(nested)
        values = nested.codes.view(*floats.scale.shape, -1).float() * floats.scale[..., None]
        if floats.minimum is not None:
            values -= floats.minimum[..., None]
        out[piece] = values.view(len(raw), -1)
    return out.view(weight.shape)


def _floats(nested: Nested) -> _Piece:
    def of_sub_blocks(scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        each = whole.view(*scale.shape, -1).float()
        return (scale[..., None] * each).view(len(whole), -1)

    minimum = None
    if nested.sub_minima is not None and nested.minimum_scale is not None:
        minimum = of_sub_blocks(nested.minimum_scale, nested.sub_minima)
    return _Piece(of_sub_blocks(nested.scale, nested.sub_scales), minimum)
