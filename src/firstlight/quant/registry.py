"""The formats by name, and the one question everyone asks: the values of a weight.

Adding a format is one file, one line here and one line in `facts.checkpoint.formats`. Invariant: the names
here are the names in `facts.checkpoint.formats.SUPPORTED`.
"""

from __future__ import annotations

import torch

from firstlight.quant.fp4 import Fp4
from firstlight.quant.fp8 import Fp8
from firstlight.quant.int4 import Int4
from firstlight.quant.int4_zero import Int4Zero
from firstlight.quant.int8 import Int8
from firstlight.quant.nested import Q4_K, Q6_K
from firstlight.quant.q4_0 import Q4_0
from firstlight.quant.q4_1 import Q4_1
from firstlight.quant.q8_0 import Q8_0
from firstlight.quant.unquantized import BF16, F16, F32, Unquantized
from firstlight.quant.weight import BlockFormat, HalvedFormat, NestedFormat, Weight, WeightFormat

UNQUANTIZED: dict[str, Unquantized] = {"F32": F32, "F16": F16, "BF16": BF16}
BLOCK_FORMATS: dict[str, BlockFormat] = {"Q8_0": Q8_0(), "Q4_0": Q4_0(), "Q4_1": Q4_1()}
# Of quantised safetensors: their scales are wider than the fast layouts', which take them narrowed.
HALVED_FORMATS: dict[str, HalvedFormat] = {"INT4": Int4(), "INT4_ZERO": Int4Zero(), "INT8": Int8()}
AFFINE_FORMATS: dict[str, BlockFormat] = {**BLOCK_FORMATS, **HALVED_FORMATS}
NESTED_FORMATS: dict[str, NestedFormat] = {"Q4_K": Q4_K(), "Q6_K": Q6_K()}
SMALL_FLOATS: dict[str, WeightFormat] = {"FP8": Fp8(), "FP4": Fp4()}
FORMATS: dict[str, WeightFormat] = {**UNQUANTIZED, **AFFINE_FORMATS, **NESTED_FORMATS, **SMALL_FLOATS}


def dequantize(weight: Weight) -> torch.Tensor:
    """The exact values of a weight, float32 in its shape, columns in the order of the matrix."""
    values = FORMATS[weight.format].dequantize(weight)
    if weight.order is None:
        return values
    in_order = torch.empty_like(values)
    in_order[:, weight.order] = values
    return in_order
