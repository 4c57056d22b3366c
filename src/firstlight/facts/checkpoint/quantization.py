"""quantization_config of a config.json: which scheme a module's weight is stored by.

Knows compressed-tensors (groups with targets, `re:` patterns and ignore lists), fp8, awq, gptq and modelopt.
Invariant: no scheme is refused here before a module asks for it, so that the error names the module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG
from firstlight.facts.checkpoint.schemes import AnyScheme, Scheme, Unreadable

READABLE = (
    "Readable: compressed-tensors pack-quantized (4 bits, groups of 32 or a multiple), int-quantized, "
    "float-quantized, nvfp4- and mxfp4-pack-quantized; fp8; awq and gptq of 4 bits; modelopt FP8 and NVFP4. "
    "Or use the unquantised safetensors, or a GGUF file of the same model."
)
# e4m3 without infinities, as DeepSeek, MiniMax, torch, safetensors and the engines spell it.
_E4M3 = frozenset(
    ("e4m3", "e4m3fn", "fp8", "fp8_e4m3", "fp8_e4m3fn", "f8_e4m3", "f8_e4m3fn")
    + ("float8", "float8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn")
)
# Classes that compressed-tensors names in targets, and whose weights are the matrices of a language model.
_LINEAR = ("Linear", "LinearBase", "ColumnParallelLinear", "RowParallelLinear")


@dataclass(frozen=True)
class Quantization:
    """What a configuration says about quantised modules. `groups`: targets, and the scheme that they have."""

    method: str
    where: str
    groups: tuple[tuple[tuple[str, ...], AnyScheme], ...]
    ignored: tuple[str, ...] = ()
    unconverted: tuple[str, ...] = ()  # left as they were: only asked for where no tensor shows it

    def scheme_of(self, module: str, stored_name: str) -> Scheme:
        """The scheme of a module whose tensors are quantised; both names of it are looked for.

        Raises `UnsupportedError` for one that cannot be read, `ModelFileError` where the configuration says
        that it is not quantised.
        """
        names = (module, stored_name)
        if any(_matches(pattern, names) for pattern in self.ignored):
            raise ModelFileError(
                f"{self.where}: the module {stored_name} is to be ignored, and its weight is quantised.",
                CHECK_CONFIG,
            )
        scheme = self._found(names)
        if scheme is None:
            raise ModelFileError(
                f"{self.where}: no group of the configuration is for the module {stored_name}, whose weight "
                "is quantised.",
                CHECK_CONFIG,
            )
        if isinstance(scheme, Unreadable):
            raise UnsupportedError(
                f"{self.where}: the weight of {stored_name} is stored as {scheme.words}, which cannot be "
                "read.",
                scheme.remedy,
            )
        return scheme

    def declared(self, names: tuple[str, str]) -> AnyScheme | None:
        """The scheme of a module by its names alone, no tensor being there; None for one left as it was."""
        if any(_matches(pattern, names) for pattern in (*self.ignored, *self.unconverted)):
            return None
        return self._found(names)

    def require_readable(self) -> None:
        """For a model none of whose tensors look quantised: a method that is not known must have done it."""
        for _, scheme in self.groups:
            if isinstance(scheme, Unreadable):
                raise UnsupportedError(f"{self.where}: {scheme.words} cannot be read.", scheme.remedy)

    def _found(self, names: tuple[str, str]) -> AnyScheme | None:
        """By name first, then by class, as compressed-tensors does."""
        for targets, scheme in self.groups:
            if any(_matches(target, names) for target in targets):
                return scheme
        return next((scheme for targets, scheme in self.groups if set(targets) & set(_LINEAR)), None)


def read_quantization(values: Mapping[str, Any], where: str) -> Quantization:
    """The meaning of a quantization_config (or of modelopt's hf_quant_config.json)."""
    if isinstance(values.get("quantization"), Mapping):  # modelopt's own file
        values = {"quant_method": "modelopt", **values["quantization"]}
    fields = Fields(values, f"{where}: quantization_config")
    named = fields.string("quant_method", "compressed-tensors" if "config_groups" in values else "").lower()
    method = "compressed-tensors" if named == "compressed_tensors" else named  # vLLM knows both
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt, "modelopt_fp4": _modelopt}
    scheme: AnyScheme = Unreadable(f"quant_method {method}", READABLE)
    if method in readers:
        scheme = readers[method](fields)
    return Quantization(method, fields.where, ((("Linear",), scheme),), unconverted=_unconverted(fields))


def _matches(pattern: str, names: tuple[str, str]) -> bool:
    if not pattern.startswith("re:"):
        return pattern in names
    try:
        return any(re.match(pattern[3:], name) for name in names)
    except re.error:
        return False


def _compressed_tensors(fields: Fields) -> Quantization:
    common = fields.string("format", "dense")
    groups = []
    for name, values in fields.mapping("config_groups").items():
        if not isinstance(values, Mapping):
            raise fields.error("config_groups", "an object of objects")
        group = Fields(values, f"{fields.where}: {name}")
        targets = _texts(group, "targets") or ("Linear",)
        kind = group.string("format", common)
        weights = group.mapping("weights")
        if weights:
            groups.append((targets, _of_group(kind, Fields(weights, group.where))))
    return Quantization("compressed-tensors", fields.where, tuple(groups), _texts(fields, "ignore"))


def _unconverted(fields: Fields) -> tuple[str, ...]:
    """Names of modules, with all that is in them, or ends of names."""
    names = map(re.escape, _texts(fields, "modules_to_not_convert") or ("lm_head",))
    return tuple(rf"re:(?:{name}(?:\..*)?|.*\.{name})$" for name in names)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    values = fields.values.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(name, "a list of names")
    return tuple(values)


def _of_group(kind: str, weights: Fields) -> AnyScheme:
    """`kind` is the format of the files, `weights` the arguments of the quantisation."""
    bits, number = weights.integer("num_bits", 8), weights.string("type", "int")
    size = weights.integer("group_size", 0, minimum=-1)
    implied = "group" if size > 0 else "channel" if size < 0 else "tensor"  # the library's own rule
    strategy = weights.string("strategy", implied)
    symmetric = weights.boolean("symmetric", True)
    grouping = f"group {size}" if "group" in strategy else strategy
    sign = "symmetric" if symmetric else "asymmetric"
    words = f"compressed-tensors {kind} {number}{bits} {grouping} {sign}"
    if weights.values.get("actorder") in ("group", "dynamic", True):
        words += " with columns in another order (actorder)"
    group_size = size if "group" in strategy else 0
    if kind == "pack-quantized" and (number, bits) == ("int", 4) and strategy in ("group", "channel"):
        return _in_groups(Scheme("pack_quantized", words, group_size, symmetric))
    if kind in ("int-quantized", "naive-quantized") and (number, bits) == ("int", 8) and symmetric:
        return _in_groups(Scheme("int8", words, group_size))
    if kind in ("float-quantized", "naive-quantized") and (number, bits) == ("float", 8):
        block = weights.values.get("block_structure") if strategy == "block" else None
        return _in_groups(Scheme("fp8", words, group_size, block=_block(weights, block)))
    if kind == "nvfp4-pack-quantized" and size == 16:
        return Scheme("nvfp4", words, 16, divides=True)
    if kind == "mxfp4-pack-quantized" and size == 32:
        return Scheme("mxfp4", words, 32)
    return Unreadable(words, READABLE)


def _in_groups(scheme: Scheme) -> AnyScheme:
    """Groups are put together from blocks of 32 inputs, so they must be whole ones."""
    if scheme.group_size % 32:
        return Unreadable(scheme.words, f"Its groups are no multiple of 32 inputs. {READABLE}")
    return scheme


def _block(fields: Fields, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) for size in value)
    if not is_pair or value[0] < 1 or value[1] < 1 or value[1] % 32:
        raise ModelFileError(
            f"{fields.where}: blocks of {str(value)[:80]} are not rows and a multiple of 32 columns.",
            CHECK_CONFIG,
        )
    return value[0], value[1]


def _fp8(fields: Fields) -> AnyScheme:
    block = _block(fields, fields.values.get("weight_block_size"))
    layout = fields.string("fmt", "e4m3")
    words = f"fp8 {layout}, " + (f"blocks of {block[0]}x{block[1]}" if block else "one scale")
    return Scheme("fp8", words, block=block) if layout.lower() in _E4M3 else Unreadable(words, READABLE)


def _awq(fields: Fields) -> AnyScheme:
    bits, version = fields.integer("bits", fields.integer("w_bit", 4)), fields.string("version", "gemm")
    size = fields.integer("group_size", fields.integer("q_group_size", 128), minimum=-1)
    words = f"awq {version} int{bits} group {size}"
    if bits != 4 or version.lower() != "gemm":
        return Unreadable(words, READABLE)
    return _in_groups(Scheme("awq", words, max(size, 0), not fields.boolean("zero_point", True)))


def _gptq(fields: Fields) -> AnyScheme:
    bits, size = fields.integer("bits", 4), fields.integer("group_size", 128, minimum=-1)
    kind, symmetric = fields.string("checkpoint_format", "gptq").lower(), fields.boolean("sym", True)
    words = f"gptq {kind} int{bits} group {size}{'' if symmetric else ' asymmetric'}"
    if fields.boolean("desc_act", False):
        words += " desc_act"
    if bits != 4 or kind not in ("gptq", "gptq_v2"):
        return Unreadable(words, READABLE)
    return _in_groups(Scheme("gptq", words, max(size, 0), symmetric, zero_shift=int(kind == "gptq")))


def _modelopt(fields: Fields) -> AnyScheme:
    algorithm = fields.string("quant_algo", "").upper()
    words = f"modelopt {algorithm}"
    if algorithm == "NVFP4":
        return Scheme("nvfp4", words, 16)
    return Scheme("fp8", words) if algorithm == "FP8" else Unreadable(words, READABLE)
