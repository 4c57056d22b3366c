"""F32, F16 and BF16: the values themselves. Registered in `registry`.

Invariant: `view` hands out the weight's own bytes under another type; nothing is copied or rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.weight import Weight


@dataclass(frozen=True)
class Unquantized:
    """Plain values of one torch type."""

    name: str
    dtype: torch.dtype

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED[self.name]

    def view(self, weight: Weight) -> torch.Tensor:
        """The values in their own type, sharing memory with `weight.raw`."""
        return weight.raw.view(self.dtype).view(weight.shape)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return self.view(weight).to(torch.float32, copy=True)


F32 = Unquantized("F32", torch.float32)
F16 = Unquantized("F16", torch.float16)
BF16 = Unquantized("BF16", torch.bfloat16)
