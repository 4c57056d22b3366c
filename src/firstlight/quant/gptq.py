"""GPTQ: words of 8 codes along the inputs, with the file's rows as the matrix's columns.

Registered in `packings`. Zero points come in words of 8 along the outputs, one less than they are (in files
of version 1). `g_idx` says which group a column belongs to; with desc_act that is not its place. Invariant:
codes and zero points are taken over, only their places change.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.remedies import CHECK_CONFIG
from firstlight.quant.int4 import int4_blocks
from firstlight.quant.parts import Parts, nibbles

ZERO_OF_SYMMETRIC = 8


def gptq(parts: Parts) -> torch.Tensor:
    """Blocks of INT4_ZERO; of INT4 where the file says that it is symmetric."""
    _require_order(parts)
    codes = parts.cut(nibbles(parts.values("codes")), "codes")
    scales = parts.block_grid("scales")
    zeros_NG = nibbles(parts.values("zeros").t()).t() + parts.scheme.zero_shift  # noqa: N806 - shape suffix
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


def _require_order(parts: Parts) -> None:
    if not parts.has("order"):
        return
    groups = parts.grid("order", 1)[0].to(torch.int64)
    size = parts.scheme.group_size or parts.facts.shape[1]
    expected = torch.arange(*parts.window.columns) // size
    if not torch.equal(groups, expected):
        raise UnsupportedError(
            f"{parts.facts.path}: the weight of {parts.facts.name.removesuffix('.weight')} is stored as "
            f"{parts.scheme.words}, with columns in another order than their groups.",
            "Use a file made without desc_act, or a GGUF file of the same model.",
        )
