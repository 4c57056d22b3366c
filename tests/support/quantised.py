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
from firstlight.facts.hf_config_writer import hf_config
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


def _pack_quantized(group: int, *, symmetric: bool = True) -> Recipe:
    def store(values: torch.Tensor) -> Stored:
        codes, scales, zeros, exact = four_bits(values, group, symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": words_of(codes),
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
        "actorder": None,
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


RECIPES: dict[str, Recipe] = {
    "int4 group 32": _pack_quantized(32),
    "int4 group 128": _pack_quantized(128),
    "int4 channel": _pack_quantized(0),
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
