"""What the 32-value block formats share: taking scales, bytes and nibbles out of raw blocks.

Shapes: N rows, B blocks a row, K = 32 B values a row. Invariant: every function works on any number of rows
with a fixed number of torch operations.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import BlockGeometry
from firstlight.quant.weight import Weight

# Rows are dequantized in pieces of about this many values, so that the passes over a piece stay in cache.
PIECE_VALUES = 1 << 18


def blocks_of(weight: Weight, geometry: BlockGeometry) -> torch.Tensor:
    """The raw blocks, uint8 [N, B, block_bytes]; a view. A vector counts as one row."""
    rows = weight.raw.shape[0]
    return weight.raw.view(rows, -1, geometry.block_bytes)


def halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block as float32 [N, B]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)


def write_nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Unpacks 4-bit codes: `packed` uint8 [N, B, 16] into `out` [N, B, 32] of any type.

    The low halves of the 16 bytes are the first 16 values of the block, the high halves the last 16.
    """
    out[..., :16].copy_(packed & 15)
    out[..., 16:].copy_(packed >> 4)


def row_pieces(rows: int, values_per_row: int) -> list[slice]:
    """Slices over the rows, each of about `PIECE_VALUES` values."""
    step = max(1, PIECE_VALUES // max(1, values_per_row))
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
