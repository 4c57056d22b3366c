"""How the matrices of a checkpoint are stored, by its config.json alone: names, types and shapes of tensors.

What a quantization_config says is read by `quantization`, and the meaning of the bytes lives in the room
`quant`. Invariant: a scheme whose sizes are not known is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.quantization import Quantization, read_quantization
from firstlight.facts.checkpoint.schemes import Scheme

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NUMBERS = re.compile(r"\{(\d+)[^{}]*\}")
_WORDS = re.compile(r"\{([a-z]\w*),[^{}]*\}")

Shape = tuple[int, int]  # outputs, inputs
StoredTensor = tuple[str, str, tuple[int, ...]]  # suffix, type, shape
Kind = tuple[str, str, bool]  # who made it, the packing, and whether it has blocks


@dataclass(frozen=True)
class DeclaredWeights:
    """`dtype` of what is not quantised."""

    dtype: str
    quantization: Quantization | None = None

    def tensors(self, module: str, stored_name: str, shape: Shape) -> list[StoredTensor]:
        """What stands for the matrix of a linear layer, by both of its names; of many in one, the first."""
        if self.quantization is not None:
            scheme = self.quantization.declared((_first(module), _first(stored_name)))
            if isinstance(scheme, Scheme):
                return _STORED[_kind(self.quantization, scheme)](scheme, shape, self.dtype)
        return [("weight", self.dtype, shape)]


def read_scheme(config: Mapping[str, Any], where: str) -> DeclaredWeights:
    """The weights of a config.json, of a wrapped model's text_config if it has one."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    fields = Fields({**config, **inner}, where)
    dtype_name = fields.string("dtype", fields.string("torch_dtype", "bfloat16")).removeprefix("torch.")
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedError(
            f"{where}: the type {dtype_name!r} is not known.", "Known: bfloat16, float16, float32."
        )
    values = fields.mapping("quantization_config")
    if not values:
        return DeclaredWeights(dtype)
    quantization = read_quantization(values, where)
    schemes = [scheme for _, scheme in quantization.groups]
    kinds = {_kind(quantization, s) if isinstance(s, Scheme) else None for s in schemes}
    if not kinds or not kinds <= _STORED.keys():
        raise UnsupportedError(
            f"{quantization.where}: the sizes of {quantization.method!r} weights are not known from the "
            "configuration alone.",
            "Give a folder that has the safetensors files too: then their headers are read.",
        )
    return DeclaredWeights(dtype, quantization)


def _pack_quantized(scheme: Scheme, shape: Shape, dtype: str) -> list[StoredTensor]:
    """Codes in int32 words of eight, a scale for each group along the inputs."""
    outputs, inputs = shape
    groups = -(-inputs // (scheme.group_size or inputs))
    found: list[StoredTensor] = [
        ("weight_packed", "I32", (outputs, -(-inputs // 8))),
        ("weight_scale", dtype, (outputs, groups)),
        ("weight_shape", "I32", (2,)),
    ]
    if not scheme.symmetric:
        found.append(("weight_zero_point", "I32", (-(-outputs // 8), groups)))
    return found


def _fp8(scheme: Scheme, shape: Shape, dtype: str) -> list[StoredTensor]:
    """As DeepSeek has it: a float32 scale for each block of rows and columns."""
    assert scheme.block is not None, "its kind has blocks"
    rows, columns = scheme.block
    return [
        ("weight", "F8_E4M3", shape),
        ("weight_scale_inv", "F32", (-(-shape[0] // rows), -(-shape[1] // columns))),
    ]


# What reads such tensors is in `packings.PACKINGS`.
_STORED: dict[Kind, Callable[[Scheme, Shape, str], list[StoredTensor]]] = {
    ("compressed-tensors", "pack_quantized", False): _pack_quantized,
    ("fp8", "fp8", True): _fp8,
}


def _kind(quantization: Quantization, scheme: Scheme) -> Kind:
    return quantization.method, scheme.packing, scheme.block is not None


def _first(module: str) -> str:
    """Of the modules that one name with {ranges} and {words,words} stands for."""
    return _WORDS.sub(r"\1", _NUMBERS.sub(r"\1", module))
