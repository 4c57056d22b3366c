"""Which stored tensors make up a quantised matrix: found by their names, checked by types and shapes.

Called by `hf_checkpoint` once all headers are read. Invariant: the parts of a `TensorFacts` have the sizes
that its shape demands, so that a reader may slice them without looking again.

Shapes: N rows (outputs), K columns (inputs) of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.formats import SUPPORTED
from firstlight.facts.quantization import Quantization
from firstlight.facts.remedies import DOWNLOAD_AGAIN
from firstlight.facts.safetensors_header import SafetensorsEntry
from firstlight.facts.schemes import Scheme
from firstlight.facts.tensor_facts import StoredPart, TensorFacts

# A module with one of these, or with a `weight` of one of these types, is quantised.
_CODES = ("weight_packed", "qweight")
_CODE_TYPES = ("F8_E4M3", "I8", "U8")
# What such a module may have beside its codes.
_COMPANIONS = (
    *("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_shape", "weight_g_idx", "scales", "qzeros", "g_idx"),
    *("input_scale", "input_global_scale", "input_zero_point"),
)
# Scales of a quantised KV cache: keys and values are held as `--kv-dtype` says.
_OF_KV = ("k_scale", "v_scale", "q_scale")
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
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"the tensor {self.stored_name}.{name} is missing, which a weight stored as "
                f"{self.scheme.words} needs.",
                "Download the model again.",
            )
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
        tensor = self.tensors[name]
        if len(tensor.entry.shape) != 2:
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
        words = -(-rows // 8)
        parts.append(module.part("weight_zero_point", "zeros", (words, groups), (8, size), dtypes=("I32",)))
    return (rows, columns), tuple(parts)


PACKINGS: dict[str, Callable[[Module], Parts]] = {"pack_quantized": _pack_quantized}


def join_parts(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> tuple[list[TensorFacts], set[str]]:
    """The matrices that are stored in several tensors, and the names of the tensors that are used up so.

    Raises `UnsupportedError` with module and scheme for one that cannot be read.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        if word in _CODES or (word == "weight" and tensor.entry.dtype in _CODE_TYPES):
            modules[module] = {}
    used = {name for name in stored if name.rpartition(".")[2] in _OF_KV}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        if module in modules and word in (*_CODES, *_COMPANIONS):
            modules[module][word] = tensor
            used.add(name)
    return [_joined(name, tensors, quantization) for name, tensors in modules.items()], used


def _joined(name: str, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> TensorFacts:
    first = next(iter(tensors.values()))
    if quantization is None:
        raise UnsupportedError(
            f"{first.path}: the tensor {first.entry.name} has the type {first.entry.dtype}, and config.json "
            "has no quantization_config that says what it means.",
            "Download config.json again, or use safetensors in bf16, fp16 or fp32, or a GGUF file.",
        )
    stored_name = first.entry.name.rpartition(".")[0]
    module = Module(name, stored_name, quantization.scheme_of(name, stored_name), tensors)
    shape, parts = PACKINGS[module.scheme.packing](module)
    return TensorFacts(
        f"{name}.weight",
        module.scheme.format,
        shape,
        parts[0].path,
        parts[0].offset,
        sum(part.nbytes for part in parts),
        parts=parts,
        scheme=module.scheme,
    )
