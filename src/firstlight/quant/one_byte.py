"""Codes of one byte with separate scales: FP8 of every granularity, and the INT8 of W8A8.

Registered in `packings`. A scale may stand for the matrix, a row, a group of inputs or a block of rows and
columns; DeepSeek calls that of a block `weight_scale_inv`, and multiplies with it all the same. Invariant: a
byte that is not a number is an error, since the kernels do not know it.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN
from firstlight.quant.parts import Parts
from firstlight.quant.scaled import scaled_blocks

NOT_A_NUMBER = 0x7F  # of e4m3, with either sign


def fp8(parts: Parts) -> torch.Tensor:
    """Blocks of FP8."""
    codes = parts.values("codes").view(torch.uint8)
    if bool(((codes & 0x7F) == NOT_A_NUMBER).any()):
        raise ModelFileError(
            f"{parts.facts.path}: values of {parts.facts.name} are not numbers.", DOWNLOAD_AGAIN
        )
    return scaled_blocks(codes, parts.block_grid("scales"))


def int8(parts: Parts) -> torch.Tensor:
    """Blocks of INT8."""
    return scaled_blocks(parts.values("codes"), parts.block_grid("scales"))
