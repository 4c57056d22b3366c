"""Descriptions of tiny models with experts, and folders of them with random weights.

Used by tests of the engine over such models. Every size differs from every other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from firstlight.facts.description import Experts, LatentAttention, ModelDescription, RopeScaling
from firstlight.models.random_model import Unpacked, write_random_model
from support.checkpoints import tiny_description

LATENT = LatentAttention(query_rank=40, latent_size=32, nope_size=24, rope_size=16, value_size=20)
YARN = RopeScaling(kind="yarn", factor=32.0, original_max_position=64)  # with mscale = mscale_all_dim = 1
GROUPED = Experts(
    num=12, num_chosen=3, inner_size=64, shared_size=64, dense_layers=(0,), scoring="sigmoid", has_bias=True,
    num_groups=4, num_chosen_groups=2, num_group_scores=2, scale=2.5,
)  # fmt: skip
SOFTMAX = Experts(num=6, num_chosen=2, inner_size=64)


def kimi(**changes: Any) -> ModelDescription:
    """A Kimi-K2 in small: latent attention under yarn, a dense layer, grouped experts and a shared one."""
    fields = {
        "num_layers": 3, "num_kv_heads": 4, "head_size": 40, "rotary_size": 16, "latent": LATENT,
        "experts": GROUPED, "rope_scaling": YARN,
        "score_scale": 40**-0.5 * (0.1 * math.log(32.0) + 1.0) ** 2,
    }  # fmt: skip
    return tiny_description(**{"architecture": "kimi_k2", **fields, **changes})


def description_of(architecture: str, **changes: Any) -> ModelDescription:
    """A tiny model with experts of each architecture."""
    if architecture == "kimi_k2":
        return kimi(**changes)
    fields: dict[str, Any] = {"num_layers": 3, "experts": SOFTMAX}
    if architecture == "qwen3_moe":
        fields |= {"qk_norm": True, "experts": replace(SOFTMAX, dense_layers=(1,), normalises=False)}
    elif architecture == "mixtral":
        fields |= {"intermediate_size": SOFTMAX.inner_size, "sliding_window": 40}
    else:
        experts = replace(SOFTMAX, scoring="sigmoid", has_bias=True)
        fields |= {"intermediate_size": SOFTMAX.inner_size, "experts": experts, "rotary_size": 8}
        fields |= {"whole_qk_norm": True}
    return tiny_description(architecture, **{**fields, **changes})


def write_experts(folder: Path, description: ModelDescription, **options: Any) -> Path:
    """A folder of random weights in float32."""
    return write_random_model(folder, description, Unpacked(torch.float32), **options)
