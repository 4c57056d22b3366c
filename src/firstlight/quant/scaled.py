"""What the formats share whose blocks begin with a scale in float32: of weights stored in several tensors.

Invariant: nothing is rounded but the float32 product of a value and its scale.

Shapes: N rows, B blocks of a row, K values of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.formats import BlockGeometry
from firstlight.quant.blocks import blocks_of, row_pieces
from firstlight.quant.weight import Weight

LARGEST_HALF = 65504.0


def scaled_values(
    weight: Weight, geometry: BlockGeometry, read: Callable[[torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Every value, float32 in the weight's shape.

    `read(blocks, out)` writes what codes [N, B, block_bytes] stand for, before the scale, to [N, B, values].
    """
    blocks = blocks_of(weight, geometry)
    rows, num_blocks, _ = blocks.shape
    values = torch.empty(rows, num_blocks, geometry.block_values)
    for piece in row_pieces(rows, num_blocks * geometry.block_values):
        read(blocks[piece], values[piece])
        values[piece].mul_(float_at(blocks[piece], 0)[..., None])
    return values.view(weight.shape)


def float_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float32 at byte `start` of each block [N, B]."""
    return blocks[..., start : start + 4].contiguous().view(torch.float32).squeeze(-1)


def as_half(numbers_NB: torch.Tensor) -> torch.Tensor:
    """The bytes of float16 numbers [N, B, 2]. Raises `UnsupportedError` for one that is too large."""
    if float(numbers_NB.abs().max()) > LARGEST_HALF:
        raise UnsupportedError(
            f"the scale of a weight is larger than float16 can hold ({LARGEST_HALF:.0f})",
            "Serve this model with --dtype float32.",
        )
    return numbers_NB.half()[..., None].view(torch.uint8)


def with_half_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Raw blocks of a GGUF format [N, bytes]: scales rounded to float16, codes as they are."""
    return torch.cat((as_half(float_at(blocks, 0)), blocks[..., 4:]), -1).flatten(1)


def scaled_blocks(codes: torch.Tensor, scales_NB: torch.Tensor) -> torch.Tensor:
    """Raw blocks that begin with a float32 scale; `codes` [N, bytes of all codes] of one byte each."""
    grouped = codes.contiguous().view(torch.uint8).unflatten(1, (scales_NB.shape[1], -1))
    return torch.cat((scales_NB.float()[..., None].view(torch.uint8), grouped), -1).flatten(1)
