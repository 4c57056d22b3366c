"""Which stored tensors make up a quantised matrix: found by their names, checked by types and shapes.

Invariant: the parts that come back have the sizes that the matrix's shape demands, so that a reader may slice
them without looking again.

Shapes: N rows (outputs), K columns (inputs) of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN
from firstlight.facts.checkpoint.safetensors_header import SafetensorsEntry
from firstlight.facts.checkpoint.schemes import Scheme
from firstlight.facts.checkpoint.tensor_facts import StoredPart

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file; `name` within the language model, `entry.name` within the file."""

    name: str
    path: str
    entry: SafetensorsEntry


@dataclass(frozen=True)
class Module:
    """A quantised module: its tensors by the last word of their names."""

    name: str
    stored_name: str
    scheme: Scheme
    tensors: Mapping[str, StoredTensor]

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of this name. Raises `ModelFileError` where there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"the tensor {self.stored_name}.{name} is missing, which a weight stored as "
                f"{self.scheme.words} needs.",
                "Download the model again.",
            )
        return tensor

    def part(
        self,
        name: str,
        role: str,
        shape: tuple[int, int],
        each: tuple[int, int] = (1, 1),
        *,
        dtypes: tuple[str, ...] = _FLOATS,
        is_transposed: bool = False,
    ) -> StoredPart:
        """A part of this shape and one of these types. Raises `ModelFileError` or `UnsupportedError`."""
        tensor = self.tensor(name)
        entry = tensor.entry
        if entry.dtype not in dtypes:
            raise UnsupportedError(
                f"{tensor.path}: the tensor {entry.name} has the type {entry.dtype}, where "
                f"{self.scheme.words} has {' or '.join(dtypes)}.",
                "Use another file of this model.",
            )
        if math.prod(entry.shape) != math.prod(shape) or (1 not in shape and entry.shape != shape):
            raise self.wrong_shape(tensor, str(list(shape)))
        place = (tensor.path, entry.offset, entry.nbytes)
        return StoredPart(role, entry.dtype, shape, *place, *each, is_transposed)

    def wrong_shape(self, tensor: StoredTensor, expected: str) -> ModelFileError:
        """The error about a tensor that does not go with the others."""
        return ModelFileError(
            f"{tensor.path}: the tensor {tensor.entry.name} has the shape {list(tensor.entry.shape)}; "
            f"{self.scheme.words} demands {expected}.",
            DOWNLOAD_AGAIN,
        )

    def matrix_shape(self, name: str, per_word: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the codes, each times the codes that one stored element holds that way."""
        tensor = self.tensor(name)
        if len(tensor.entry.shape) != 2 or 0 in tensor.entry.shape:
            raise self.wrong_shape(tensor, "rows and columns")
        return tensor.entry.shape[0] * per_word[0], tensor.entry.shape[1] * per_word[1]

    def num_groups(self, columns: int) -> int:
        """Scales of a row. Raises `UnsupportedError` where groups are not whole."""
        size = self.scheme.group_size or columns
        if columns % size or columns % SUPPORTED[self.scheme.format].block_values:
            raise UnsupportedError(
                f"the weight of {self.stored_name} has {columns} inputs, which do not fall into whole groups "
                f"of {self.scheme.words}, or blocks of 32.",
                "Use the unquantised safetensors, or a GGUF file of the same model.",
            )
        return columns // size


def _require_zeros(module: Module, name: str, said: str) -> None:
    if name not in module.tensors:
        raise ModelFileError(
            f"config.json and the tensors disagree: config.json says {said}, but there is no tensor "
            f"{module.stored_name}.{name}.",
            "Get config.json and safetensors files of one version of the model, or correct config.json.",
        )


Parts = tuple[tuple[int, int], tuple[StoredPart, ...]]


def _pack_quantized(module: Module) -> Parts:
    """int32 words of 8 codes along the inputs; zero points in words of 8 along the outputs."""
    rows, columns = module.matrix_shape("weight_packed", (1, 8))
    groups = module.num_groups(columns)
    size = columns // groups
    parts = [
        module.part("weight_packed", "codes", (rows, columns // 8), (1, 8), dtypes=("I32",)),
        module.part("weight_scale", "scales", (rows, groups), (1, size)),
    ]
    if not module.scheme.symmetric:
        _require_zeros(module, "weight_zero_point", "symmetric: false")
        words = -(-rows // 8)
        parts.append(module.part("weight_zero_point", "zeros", (words, groups), (8, size), dtypes=("I32",)))
    if "weight_g_idx" in module.tensors:
        parts.append(module.part("weight_g_idx", "order", (1, columns), (rows, 1), dtypes=("I32",)))
    return (rows, columns), tuple(parts)


def _one_byte(module: Module, dtype: str) -> Parts:
    """Codes as they are; scales of the matrix, of rows, of groups or of blocks, as their shape says."""
    rows, columns = shape = module.matrix_shape("weight", (1, 1))
    groups = module.num_groups(columns)
    codes = module.part("weight", "codes", shape, dtypes=(dtype,))
    name = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
    found = module.tensors[name].entry.shape if name in module.tensors else ()
    each = (1, columns // groups)
    if module.scheme.block is not None:
        each = module.scheme.block
    elif math.prod(found) == 1:
        each = (rows, columns)
    grid = (-(-rows // each[0]), -(-columns // each[1]))
    return shape, (codes, module.part(name, "scales", grid, each))


def _awq(module: Module) -> Parts:
    """Transposed; int32 words of 8 outputs."""
    columns, rows = module.matrix_shape("qweight", (1, 8))
    groups = module.num_groups(columns)
    size, words = columns // groups, rows // 8

    def part(name: str, role: str, shape: tuple[int, int], each: tuple[int, int]) -> StoredPart:
        dtypes = _FLOATS if role == "scales" else ("I32",)
        return module.part(name, role, shape, each, dtypes=dtypes, is_transposed=True)

    parts = [
        part("qweight", "codes", (columns, words), (8, 1)),
        part("scales", "scales", (groups, rows), (1, size)),
    ]
    if not module.scheme.symmetric:
        _require_zeros(module, "qzeros", "zero_point: true")
        parts.append(part("qzeros", "zeros", (groups, words), (8, size)))
    return (rows, columns), tuple(parts)


def _gptq(module: Module) -> Parts:
    """Transposed; words of 8 inputs, zero points in words of 8 outputs, perhaps the group of each input."""
    columns, rows = module.matrix_shape("qweight", (8, 1))
    groups = module.num_groups(columns)
    size = columns // groups

    def part(name: str, role: str, shape: tuple[int, int], each: tuple[int, int]) -> StoredPart:
        dtypes = _FLOATS if role == "scales" else ("I32",)
        return module.part(name, role, shape, each, dtypes=dtypes, is_transposed=True)

    parts = [
        part("qweight", "codes", (columns // 8, rows), (1, 8)),
        part("scales", "scales", (groups, rows), (1, size)),
        part("qzeros", "zeros", (groups, -(-rows // 8)), (8, size)),
    ]
    if "g_idx" in module.tensors:
        parts.append(part("g_idx", "order", (columns, 1), (rows, 1)))
    return (rows, columns), tuple(parts)


def _nvfp4(module: Module) -> Parts:
    """Two codes to a byte, a scale in e4m3 for 16 inputs, and one for the matrix."""
    names = (
        ("weight_packed", "weight_global_scale") if module.scheme.divides else ("weight", "weight_scale_2")
    )
    shape, parts = _two_to_a_byte(module, names[0], "F8_E4M3")
    return shape, (*parts, module.part(names[1], "whole", (1, 1), shape))


def _two_to_a_byte(module: Module, name: str, scale_dtype: str) -> Parts:
    rows, columns = module.matrix_shape(name, (1, 2))
    groups = module.num_groups(columns)
    codes = module.part(name, "codes", (rows, columns // 2), (1, 2), dtypes=("U8",))
    each = (1, columns // groups)
    scales = module.part("weight_scale", "scales", (rows, groups), each, dtypes=(scale_dtype,))
    return (rows, columns), (codes, scales)


PACKINGS: dict[str, Callable[[Module], Parts]] = {
    "pack_quantized": _pack_quantized,
    "fp8": lambda module: _one_byte(module, "F8_E4M3"),
    "awq": _awq,
    "gptq": _gptq,
    "int8": lambda module: _one_byte(module, "I8"),
    "nvfp4": _nvfp4,
    "mxfp4": lambda module: _two_to_a_byte(module, "weight_packed", "U8"),
}
