"""Tiny models in the formats of quantised safetensors, with the exact values that their tensors stand for.

Used by the tests of facts, loading, quant and the engine. Written from the formats' descriptions, without our
own code: a recipe gives a module's stored tensors and, by its own arithmetic, the float32 matrix they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config_writer import hf_config
from support.checkpoints import random_weights, tiny_description, write_hf_folder

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by the last word of their names; values


@dataclass(frozen=True)
class Recipe:
    """`store` makes the tensors of one matrix; `config` is the quantization_config of a whole model."""

    format: str  # that the tensors are read to
    store: Callable[[torch.Tensor], Stored]
    config: Mapping[str, Any]


def description(**changes: Any) -> ModelDescription:
    """A llama whose matrices fall into whole groups of 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_size": 32}
    return tiny_description("llama", **{**sizes, **changes})


def words_of(codes: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit codes of a row to a word, the first in the lowest bits: int32 [rows, columns / 8]."""
    eights = codes.to(torch.int64).unflatten(1, (-1, 8))
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)  # what is above 2^31 becomes negative


def four_bits(values: torch.Tensor, group: int, *, symmetric: bool, dtype: torch.dtype) -> Any:
    """Codes 0 to 15 [N, K], scales [N, groups] of `dtype`, zero points [N, groups], and the values."""
    groups = values.unflatten(1, (-1, group or values.shape[1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(-low, high) / 7.5).to(dtype)
        zeros = torch.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int64)
    raised = (groups / scales.float()[..., None]).round() + zeros[..., None]
    codes = raised.clamp(0, 15)
    exact = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).to(torch.int64), scales, zeros, exact.flatten(1)


def _shuffled(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns in an order that differs between matrices of different heights, and the group of each."""
    columns = values.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(len(values)))
    groups = torch.empty(columns, dtype=torch.int32)
    groups[order] = torch.arange(columns, dtype=torch.int32) // group
    return order, groups


def _pack_quantized(group: int, *, symmetric: bool = True, shuffled: bool = False) -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        if not shuffled:
            return in_place(values)
        order, groups = _shuffled(values, group)
        tensors, exact = in_place(values[:, order], order.argsort())
        return tensors | {"weight_g_idx": groups}, exact[:, order.argsort()]

    def in_place(values: torch.Tensor, back: torch.Tensor | slice = slice(None)) -> Stored:
        codes, scales, zeros, exact = four_bits(values, group, symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": words_of(codes[:, back]),
            "weight_scale": scales,
            "weight_shape": torch.tensor(values.shape),
        }
        if not symmetric:
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8))
            tensors["weight_zero_point"] = words_of(padded.t()).t().contiguous()
        return tensors, exact

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": "group" if shuffled else None,
        "dynamic": False,
    }
    return Recipe("INT4" if symmetric else "INT4_ZERO", store, compressed("pack-quantized", weights))


def compressed(kind: str, weights: Mapping[str, Any], **group: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights), **group}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _scaled(values: torch.Tensor, block: tuple[int, int], largest: float) -> Any:
    """The scale of each block of rows and columns, and of each value (float32)."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scales = blocks.abs().amax((1, 3)) / largest
    each = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return scales, each[:rows, :columns]


def _fp8(block: tuple[int, int] | None, name: str, config: Mapping[str, Any]) -> Recipe:
    """`block`: None for one scale; (1, 0) for one of each row."""

    def store(values: torch.Tensor) -> Stored:
        size = values.shape if block is None else (block[0], block[1] or values.shape[1])
        scales, each = _scaled(values, (size[0], size[1]), E4M3_MAX)
        codes = (values / each).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, name: scales if block is not None else scales.reshape(())}
        if block is None:
            tensors["input_scale"] = torch.tensor(1.0)
        return tensors, codes.float() * each

    return Recipe("FP8", store, config)


def _int8() -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        scales = (values.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
        codes = (values / scales.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Recipe("INT8", store, compressed("int-quantized", weights, input_activations=tokens))


# Which of 8 neighbouring outputs lies at each place of a word, from its lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(*, zero_point: bool = True) -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        made = four_bits(values, 64, symmetric=not zero_point, dtype=torch.float16)
        codes, scales, zeros, exact = made

        def along_outputs(numbers: torch.Tensor) -> torch.Tensor:
            ordered = numbers.t().unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
            return words_of(ordered)

        tensors = {"qweight": along_outputs(codes), "scales": scales.t().contiguous()}
        if zero_point:
            tensors["qzeros"] = along_outputs(zeros)
        return tensors, exact

    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": zero_point}
    return Recipe("INT4_ZERO" if zero_point else "INT4", store, config)


def _gptq(*, symmetric: bool, version: int = 1, shuffled: bool = False) -> Recipe:
    """`shuffled`: desc_act; which columns share a group differs between matrices of different widths."""

    def store(values: torch.Tensor) -> Stored:
        order = torch.arange(values.shape[1])
        groups = (order // 128).to(torch.int32)
        if shuffled:
            order, groups = _shuffled(values, 128)
        tensors, exact = in_place(values[:, order])
        tensors["g_idx"], back = groups, order.argsort()
        tensors["qweight"] = words_of(tensors.pop("codes")[:, back]).t().contiguous()
        return tensors, exact[:, back]

    def in_place(values: torch.Tensor) -> Stored:
        made = four_bits(values, 128, symmetric=symmetric, dtype=torch.float16)
        codes, scales, zeros, exact = made
        if version == 1:
            zeros = zeros.clamp(min=1)
            groups = (codes.unflatten(1, (-1, 128)) - zeros[..., None]) * scales.float()[..., None]
            exact = groups.flatten(1)
        tensors = {
            "codes": codes,
            "scales": scales.t().contiguous(),
            "qzeros": words_of(zeros.t() - int(version == 1)),
        }
        return tensors, exact

    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": shuffled, "sym": symmetric}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return Recipe("INT4" if symmetric else "INT4_ZERO", store, config)


def small_floats(values: torch.Tensor, each: torch.Tensor) -> Any:
    """The nearest e2m1 codes of values over their scales: packed in pairs, and what they are."""
    sizes = (values / each).abs()
    codes = (sizes[..., None] - E2M1).abs().argmin(-1)
    meant = E2M1[codes].copysign(values)
    codes = codes + 8 * (values < 0)
    meant = torch.where(codes == 8, -0.0, meant)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), meant


def _nvfp4(*, modelopt: bool) -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        largest = values.abs().amax()
        whole = (largest / (6 * E4M3_MAX)).reshape(1)
        scales = (_scaled(values, (1, 16), 6.0)[0] / whole).to(torch.float8_e4m3fn)
        if modelopt:
            each = scales.float() * whole
            names = {"weight_scale": scales, "weight_scale_2": whole.reshape(())}
        else:
            each = scales.float() / (1 / whole)
            names = {"weight_scale": scales, "weight_global_scale": 1 / whole}
        spread = each.repeat_interleave(16, 1)
        packed, meant = small_floats(values, spread)
        return {"weight" if modelopt else "weight_packed": packed, **names}, meant * spread

    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    config = compressed("nvfp4-pack-quantized", weights)
    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Recipe("FP4", store, config)


def _mxfp4() -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        exponents = torch.log2(_scaled(values, (1, 32), 6.0)[0]).ceil().clamp(-127, 127)
        spread = torch.exp2(exponents).repeat_interleave(32, 1)
        packed, meant = small_floats(values, spread)
        stored = (exponents + 127).to(torch.uint8)
        return {"weight_packed": packed, "weight_scale": stored}, meant * spread

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return Recipe("FP4", store, compressed("mxfp4-pack-quantized", weights))


def _float8(strategy: str, **more: Any) -> dict[str, Any]:
    return compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": strategy, **more})


BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
RECIPES: dict[str, Recipe] = {
    "int4 group 32": _pack_quantized(32),
    "int4 group 128": _pack_quantized(128),
    "int4 channel": _pack_quantized(0),
    "int4 group 32 asymmetric": _pack_quantized(32, symmetric=False),
    "int4 group 128 asymmetric": _pack_quantized(128, symmetric=False),
    "int4 group 64 actorder": _pack_quantized(64, symmetric=False, shuffled=True),
    "fp8 tensor": _fp8(None, "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 channel": _fp8((1, 0), "weight_scale", _float8("channel")),
    "fp8 block": _fp8((128, 128), "weight_scale_inv", BLOCK),
    "fp8 block of compressed-tensors": _fp8(
        (128, 128), "weight_scale", _float8("block", block_structure=[128, 128])
    ),
    "awq": _awq(),
    "awq without zero points": _awq(zero_point=False),
    "gptq": _gptq(symmetric=True),
    "gptq asymmetric": _gptq(symmetric=False),
    "gptq 2": _gptq(symmetric=False, version=2),
    "gptq desc_act": _gptq(symmetric=False, shuffled=True),
    "int8": _int8(),
    "nvfp4": _nvfp4(modelopt=False),
    "nvfp4 of modelopt": _nvfp4(modelopt=True),
    "mxfp4": _mxfp4(),
}


def is_quantised(name: str) -> bool:
    """Whether a model's tensor is stored by the recipe: all of its layers' matrices."""
    return name.endswith("_proj.weight")


def write_quantised(
    folder: Path,
    recipe: Recipe,
    model: ModelDescription | None = None,
    *,
    chosen: Callable[[str], bool] = is_quantised,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A folder of the quantised model, and beside it (`twin`) the same in float32. Gives the folder."""
    model = model or description()
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, np.ndarray] = {}
    for name, values in random_weights(model).items():
        exact[name] = values
        if chosen(name):
            stored, meant = recipe.store(torch.from_numpy(values))
            tensors |= {name.removesuffix("weight") + word: tensor for word, tensor in stored.items()}
            exact[name] = meant.numpy()
        else:
            tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
            exact[name] = tensors[name].float().numpy()
    folder.mkdir(parents=True, exist_ok=True)
    whole = hf_config(model, "bfloat16") | {"quantization_config": dict(config or recipe.config)}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_hf_folder(folder / "twin", model, exact)
    return folder
