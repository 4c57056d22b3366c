"""FP4: blocks of 16 values of e2m1 with one scale; value = e2m1 * scale. Registered in `registry`.

Put together by `packings` from NVFP4 (a scale in e4m3 for 16 inputs, and one for the matrix) and MXFP4 (a
power of two for 32). Invariant: the scale is the float32 product or quotient that the format states.

Bytes of a block: scale in float32 (4), codes (8): of two neighbouring inputs the first in the low half.
"""

from __future__ import annotations

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED, BlockGeometry
from firstlight.quant.scaled import scaled_values
from firstlight.quant.weight import Weight

# By the lower three bits; the fourth is the sign.
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*SIZES, *(-size for size in SIZES)))


class Fp4:
    """See the module."""

    @property
    def geometry(self) -> BlockGeometry:
        return SUPPORTED["FP4"]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return scaled_values(weight, self.geometry, _read)


def _read(blocks: torch.Tensor, out: torch.Tensor) -> None:
    packed = blocks[..., 4:].to(torch.int64)
    torch.stack((_VALUES[packed & 15], _VALUES[packed >> 4]), -1, out=out.unflatten(-1, (8, 2)))
