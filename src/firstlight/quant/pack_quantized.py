"""compressed-tensors "pack-quantized", 4 bits: words of 8 codes along the inputs, stored 8 higher.

Registered in `packings`. Zero points, where there are any, come in words of 8 along the outputs, 8 higher
too. Invariant: the values are those of the library before it rounds them to the type of the scales.
"""

from __future__ import annotations

import torch

from firstlight.quant.int4 import int4_blocks
from firstlight.quant.parts import Parts, nibbles


def pack_quantized(parts: Parts) -> torch.Tensor:
    """Blocks of INT4, or of INT4_ZERO."""
    codes = parts.cut(nibbles(parts.values("codes")), "codes")
    scales = parts.block_grid("scales")
    if parts.scheme.symmetric:
        return int4_blocks(codes, scales)
    return int4_blocks(codes, scales, zeros_along_rows(parts))


def zeros_along_rows(parts: Parts) -> torch.Tensor:
    """Zero points from 0 to 15 for each block [N, B], out of words of 8 rows."""
    words = parts.grid("zeros", 32)
    first = parts.window.rows[0]
    shifts = 4 * ((torch.arange(len(words)) + first) % 8)
    return words >> shifts[:, None] & 15
