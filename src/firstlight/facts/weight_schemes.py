"""What a quantisation_config makes of the matrices of a checkpoint: names, types and shapes of its tensors.

Used by `declared`, where a plan is made without headers. The meaning of the bytes lives in the room `quant`.
Invariant: a scheme whose sizes are not known is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from firstlight.base.errors import UnsupportedError
from firstlight.facts.fields import Fields

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NUMBERS = re.compile(r"\{(\d+)[^{}]*\}")
_WORDS = re.compile(r"\{([a-z]\w*),[^{}]*\}")

StoredTensor = tuple[str, str, tuple[int, ...]]  # suffix, type, shape


class Packing(Protocol):
    """How one matrix is stored."""

    def tensors(self, shape: tuple[int, int]) -> list[StoredTensor]:
        """The tensors that stand for a matrix of (outputs, inputs)."""
        ...


@dataclass(frozen=True)
class PackedIntegers:
    """compressed-tensors, pack-quantized: codes in int32, a scale for each group along the inputs."""

    num_bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str

    def tensors(self, shape: tuple[int, int]) -> list[StoredTensor]:
        """See `Packing`."""
        outputs, inputs = shape
        values = 32 // self.num_bits
        groups = -(-inputs // self.group_size)
        found: list[StoredTensor] = [
            ("weight_packed", "I32", (outputs, -(-inputs // values))),
            ("weight_scale", self.scale_dtype, (outputs, groups)),
            ("weight_shape", "I32", (2,)),
        ]
        if not self.symmetric:
            found.append(("weight_zero_point", "I32", (-(-outputs // values), groups)))
        return found


@dataclass(frozen=True)
class BlockFloats:
    """fp8 of DeepSeek: a float32 scale for each block of rows and columns."""

    rows: int
    columns: int

    def tensors(self, shape: tuple[int, int]) -> list[StoredTensor]:
        """See `Packing`."""
        scales = (-(-shape[0] // self.rows), -(-shape[1] // self.columns))
        return [("weight", "F8_E4M3", shape), ("weight_scale_inv", "F32", scales)]


@dataclass(frozen=True)
class Scheme:
    """`dtype` of what is not packed; `ignored` are names of modules, or patterns that begin with "re:"."""

    dtype: str
    packing: Packing | None = None
    ignored: tuple[str, ...] = ()

    def packs(self, module: str) -> Packing | None:
        """How a linear layer's weight is packed; None: it is not. Of many modules in one name, the first."""
        name = _WORDS.sub(r"\1", _NUMBERS.sub(r"\1", module))
        for pattern in self.ignored:
            is_expression = pattern.startswith("re:")
            if re.match(pattern[3:], name) if is_expression else _names(pattern, name):
                return None
        return self.packing


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of a config.json, of a wrapped model's text_config if it has one."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    fields = Fields({**config, **inner}, where)
    dtype_name = fields.string("dtype", fields.string("torch_dtype", "bfloat16")).removeprefix("torch.")
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedError(
            f"{where}: the type {dtype_name!r} is not known.", "Known: bfloat16, float16, float32."
        )
    quantization = Fields(fields.mapping("quantization_config"), f"{where}: quantization_config")
    if not quantization.values:
        return Scheme(dtype)
    return _quantized(quantization, dtype)


def _quantized(fields: Fields, dtype: str) -> Scheme:
    method = fields.string("quant_method")
    blocks = fields.values.get("weight_block_size")
    if method == "fp8" and isinstance(blocks, list) and len(blocks) == 2:
        ignored = fields.values.get("modules_to_not_convert") or ["lm_head"]
        return Scheme(dtype, BlockFloats(int(blocks[0]), int(blocks[1])), tuple(ignored))
    if method == "compressed-tensors" and fields.string("format", "") == "pack-quantized":
        groups = [group for group in fields.mapping("config_groups").values() if isinstance(group, Mapping)]
        if len(groups) == 1:
            weights = Fields(Fields(groups[0], fields.where).mapping("weights"), f"{fields.where}: weights")
            packing = PackedIntegers(
                weights.integer("num_bits"),
                weights.integer("group_size"),
                weights.boolean("symmetric", True),
                dtype,
            )
            return Scheme(dtype, packing, tuple(fields.values.get("ignore") or ()))
    raise UnsupportedError(
        f"{fields.where}: the sizes of {method!r} weights are not known from the configuration alone.",
        "Give a folder that has the safetensors files too: then their headers are read.",
    )


def _names(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
