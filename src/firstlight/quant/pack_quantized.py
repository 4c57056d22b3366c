"""compressed-tensors "pack-quantized", 4 bits: words of 8 codes along the inputs, stored 8 higher.

Registered in `packings`. Zero points, where there are any, come in words of 8 along the outputs, 8 higher
too. Invariant: the values are those of the library before it rounds them to the type of the scales.
"""

from __future__ import annotations

import torch

from firstlight.quant.int4 import int4_blocks
from firstlight.quant.parts import Parts, in_order, nibbles


def pack_quantized(parts: Parts) -> torch.Tensor:
    """Blocks of INT4, or of INT4_ZERO."""
    codes = in_order(parts.cut(nibbles(parts.values("codes")), "codes"), parts)
    scales = parts.block_grid("scales")
    if parts.scheme.symmetric:
        return int4_blocks(codes, scales)
    zeros_NG = nibbles(parts.values("zeros").t()).t()
    return int4_blocks(codes, scales, parts.spread(zeros_NG, "zeros", 32))
