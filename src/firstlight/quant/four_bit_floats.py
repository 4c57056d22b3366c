"""NVFP4 and MXFP4: two e2m1 codes to a byte, with scales for 16 or 32 inputs.

Registered in `packings`. Invariant: the scale of a block is what the format's own library multiplies with: of
NVFP4 the scale of 16 inputs divided by that of the matrix (compressed-tensors) or times it (modelopt), in
float32; of MXFP4 a power of two.
"""

from __future__ import annotations

import torch

from firstlight.quant.parts import Parts
from firstlight.quant.scaled import scaled_blocks

EXPONENT_OF_ONE = 127


def nvfp4(parts: Parts) -> torch.Tensor:
    """Blocks of FP4."""
    scales, whole = parts.block_grid("scales"), parts.block_grid("whole")
    return scaled_blocks(parts.values("codes"), scales / whole if parts.scheme.divides else scales * whole)


def mxfp4(parts: Parts) -> torch.Tensor:
    """Blocks of FP4, two of the same scale."""
    exponents = parts.grid("scales", 16).to(torch.int32) - EXPONENT_OF_ONE
    return scaled_blocks(parts.values("codes"), torch.ldexp(torch.ones(exponents.shape), exponents))
