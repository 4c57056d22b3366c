"""A quantised matrix from the tensors that a safetensors file stores it in: parts to blocks of one format.

Adding a packing is one file, one line here and one in `facts.checkpoint.packings`. Invariant: a slice gives
the bytes that the same slice of the whole has, and nothing is rounded.

Shapes: N rows and K columns of the slice, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from firstlight.facts.checkpoint.tensor_facts import TensorFacts
from firstlight.quant.awq import awq
from firstlight.quant.four_bit_floats import mxfp4, nvfp4
from firstlight.quant.gptq import gptq
from firstlight.quant.one_byte import fp8, int8
from firstlight.quant.pack_quantized import pack_quantized
from firstlight.quant.parts import Parts, Window
from firstlight.quant.weight import Weight

__all__ = ["PACKINGS", "Window", "assemble"]

PACKINGS: dict[str, Callable[[Parts], torch.Tensor]] = {
    "pack_quantized": pack_quantized,
    "fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "int8": int8,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
}


def assemble(facts: TensorFacts, window: Window, raw: Mapping[str, torch.Tensor]) -> Weight:
    """The weight of a slice. `raw`: bytes of each part's elements that stand for any of it, by role."""
    assert facts.scheme is not None, "a tensor of parts has a scheme"
    parts = Parts(facts, window, raw)
    blocks = PACKINGS[facts.scheme.packing](parts)
    return Weight(facts.format, window.shape, blocks.contiguous(), parts.order())
