"""FP8: blocks of 32 values of e4m3 with one scale; value = e4m3 * scale. Registered in `registry`.

Put together by `packings` from checkpoints with one scale for a matrix, a row, or 128 x 128 values.
Invariant: nothing is rounded but the float32 product. Bytes of a block: scale in float32 (4), codes (32).
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.scaled import scaled_values
from firstlight.quant.weight import Weight


class Fp8:
    """See the module."""

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["FP8"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return scaled_values(weight, self.geometry, _read)


def _read(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[..., 4:].view(torch.float8_e4m3fn))
