"""What is each family's own in a config.json: the defaults of its class, and what its class never reads.

tests/unit/facts/hf/test_config_fields.py goes through transformers' classes field by field and says of each
whether it is followed, refused or of no matter. Invariant: where config.json is silent, a family has what
transformers assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.remedies import OTHER_MODEL
from firstlight.facts.hf.hf_experts import (
    ReadExperts,
    deepseek_experts,
    minimax_experts,
    mixtral_experts,
    qwen3_experts,
)

# Which layers have a window where there is one.
NO_LAYERS, EVERY_LAYER, LAYER_TYPES = "none", "every", "by layer_types"


@dataclass(frozen=True)
class Family:
    """How a model type reads config.json, beside what all share. `ends`: tokens before and after a text."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int | None, int | None] = (None, None)
    qkv_bias: bool | None = None  # None: config.json's attention_bias says
    output_bias: bool | None = None  # None: as attention_bias
    windows: str = NO_LAYERS
    window_switch: bool = False  # there is no window unless use_sliding_window says so
    qk_norm: bool = False
    whole_qk_norm: bool = False
    mlp_bias: bool = False  # whether the field mlp_bias is read
    rope_theta: float = 10000.0
    is_latent: bool = False
    experts: ReadExperts | None = None
    has_rotary_size: bool = False  # rotary_dim or partial_rotary_factor are read
    has_known_code: bool = False  # auto_map names code that was published with it, and that this replaces


# Sizes that make no sense by default are asked for: those of latent attention and of experts among them.
_V2 = {"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2}
_V3 = {"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
_V3 |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}

FAMILIES = {
    "llama": Family(ends=(1, 2), mlp_bias=True),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096}, (1, 2), qkv_bias=False, windows=LAYER_TYPES
    ),
    "qwen2": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
        output_bias=False,
        windows=LAYER_TYPES,
        window_switch=True,
    ),
    "qwen3": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        windows=LAYER_TYPES,
        window_switch=True,
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096},
        windows=EVERY_LAYER,
        window_switch=True,
        qk_norm=True,
        experts=qwen3_experts,
    ),
    "mixtral": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        (1, 2),
        qkv_bias=False,
        windows=EVERY_LAYER,
        rope_theta=1e6,
        experts=mixtral_experts,
    ),
    "minimax_m2": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        (200034, 200020),
        qkv_bias=False,
        whole_qk_norm=True,
        rope_theta=5e6,
        experts=minimax_experts,
        has_rotary_size=True,
        has_known_code=True,
    ),
    "deepseek_v2": Family(
        _V2, (1, 2), qkv_bias=False, is_latent=True, experts=deepseek_experts, has_known_code=True
    ),
} | dict.fromkeys(
    ("deepseek_v3", "kimi_k2"),
    Family(_V3, (0, 1), qkv_bias=False, is_latent=True, experts=deepseek_experts, has_known_code=True),
)
FAMILIES["ministral"] = FAMILIES["mistral"]  # as transformers saves a Mistral whose layer_types it has read
ALIASES = {"ministral": "mistral"}
# Fields whose null means something; elsewhere it means the default.
_MAY_BE_NULL = ("num_key_value_heads", "sliding_window", "q_lora_rank", "n_routed_experts", "n_group")
# Fields that change the arithmetic, and the values at which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "per_layer_config": (),
    "pruned_heads": (),
    "no_rope_layers": (),
}
_WITHOUT_EXPERTS: dict[str, tuple[Any, ...]] = {"num_local_experts": (0, 1), "num_experts": (0,)}
_LATENT: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "partial_rotary_factor": (1, 1.0)}


def with_defaults(fields: Fields, family: Family) -> Fields:
    """The fields, with those of the family's class where they are silent."""
    said = {name: value for name, value in fields.values.items() if value is not None or name in _MAY_BE_NULL}
    return Fields({**fields.values, **family.defaults, **said}, fields.where, fields.remedy)


def refuse_unknown_arithmetic(fields: Fields, family: Family) -> None:
    """Raises an `UnsupportedError` that names the first field which asks for what is not done here."""
    neutral_values = dict(_NEUTRAL_VALUES)
    if family.experts is None:
        neutral_values |= _WITHOUT_EXPERTS
    if family.is_latent:
        neutral_values |= _LATENT
    if not family.has_known_code:
        neutral_values["auto_map"] = ()
    for name, neutral in neutral_values.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral and value not in ({}, []):
            raise UnsupportedError(
                f"{fields.where}: {name} = {str(value)[:80]} is not supported.", OTHER_MODEL
            )
    activation = fields.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"{fields.where}: hidden_act {activation!r} is not supported, only 'silu'.", OTHER_MODEL
        )
