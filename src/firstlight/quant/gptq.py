"""GPTQ: words of 8 codes along the inputs, with the file's rows as the matrix's columns.

Registered in `packings`. Zero points come in words of 8 along the outputs, one less than they are (in files
of version 1). `g_idx` says which group a column belongs to; with desc_act that is not its place, and columns
are sorted by it. Invariant: codes and zero points are taken over, only their places change.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG
from firstlight.quant.int4 import int4_blocks
from firstlight.quant.parts import Parts, in_order, nibbles

ZERO_OF_SYMMETRIC = 8


def gptq(parts: Parts) -> torch.Tensor:
    """Blocks of INT4_ZERO; of INT4 where the file says that it is symmetric."""
    codes = in_order(parts.cut(nibbles(parts.values("codes")), "codes"), parts)
    scales = parts.block_grid("scales")
    zeros_NG = nibbles(parts.values("zeros").t()).t() + parts.scheme.zero_shift
    zeros = parts.spread(zeros_NG, "zeros", 32)
    if not parts.scheme.symmetric:
        return int4_blocks(codes, scales, zeros)
    if bool((zeros != ZERO_OF_SYMMETRIC).any()):
        raise ModelFileError(
            f"{parts.facts.path}: zero points of {parts.facts.name} are not {ZERO_OF_SYMMETRIC}, though "
            "quantization_config says that it is symmetric.",
            CHECK_CONFIG,
        )
    return int4_blocks(codes, scales)
