"""AWQ ("gemm"): words of 8 codes along the outputs, in an order of their own; zero points likewise.

Registered in `packings`. The file's rows are the matrix's columns. Invariant: codes and zero points are taken
over, only their places change.
"""

from __future__ import annotations

import torch

from firstlight.quant.int4 import int4_blocks
from firstlight.quant.parts import Parts, nibbles

# Where in a word, counted from its lowest bits, the code of each of 8 neighbouring outputs lies.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(parts: Parts) -> torch.Tensor:
    """Blocks of INT4_ZERO; of INT4 where there are no zero points."""
    codes = parts.cut(_unpack(parts.values("codes").t()), "codes")
    scales = parts.block_grid("scales")
    if parts.scheme.symmetric:
        return int4_blocks(codes, scales)
    zeros_NG = _unpack(parts.values("zeros").t())
    return int4_blocks(codes, scales, parts.spread(zeros_NG, "zeros", 32))


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Codes of words [K, outputs / 8] as [outputs, K]."""
    in_words = nibbles(words).unflatten(1, (-1, 8))
    return in_words[..., list(PLACES)].flatten(1).t()
