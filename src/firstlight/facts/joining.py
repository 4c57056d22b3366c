"""Finds the quantised modules of a checkpoint among its stored tensors, and joins each to one matrix.

Called by `hf_checkpoint` with all tensors of all files. Invariant: a tensor belongs to a joined matrix, or
stays what it is; none is lost without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

from firstlight.base.errors import UnsupportedError
from firstlight.facts.packings import PACKINGS, Module, StoredTensor
from firstlight.facts.quantization import Quantization
from firstlight.facts.tensor_facts import TensorFacts

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
    first = next(tensors[word] for word in (*_CODES, "weight") if word in tensors)
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
