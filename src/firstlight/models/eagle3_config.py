"""A drafter's configuration and tensor names, as they stand in a folder of the raw dialect.

Invariant: what is written here is read back as the same.
"""

from __future__ import annotations

from typing import Any

import torch

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.drafter_config import LAYER_IDS, DrafterFile
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_experts_writer import latent_fields, yarn_fields
from firstlight.models.eagle3 import DrafterConfig

_LAYER = "midlayer."
_OF_ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj",
    "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
)  # fmt: skip
_PARTS = dict.fromkeys(_OF_ATTENTION, "self_attn.") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp."
)
_IN_LAYER = (*_PARTS, "hidden_norm", "input_layernorm", "post_attention_layernorm")


def file_name(parameter: str) -> str:
    """The name of a parameter's tensor in the raw dialect."""
    stem = parameter.split(".")[0]
    return f"{_LAYER}{_PARTS.get(stem, '')}{parameter}" if stem in _IN_LAYER else parameter


def raw_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json in the raw dialect."""
    c = config
    is_latent = c.latent is not None
    values: dict[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if is_latent else "LlamaForCausalLMEagle3"],
        "model_type": "deepseek_v3" if is_latent else "llama",
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_size,
        "intermediate_size": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _rope(c),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        LAYER_IDS: list(c.state_layers),
    }
    if c.latent is not None:
        values |= latent_fields(c.latent)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return values | {name: True for name in flags if getattr(c, name)}


def _rope(config: DrafterConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    if scaling.kind == "yarn":
        return yarn_fields(scaling, config.head_size, config.score_scale)
    if scaling.kind == "linear":
        return {
            "rope_type": "linear",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    if scaling.kind != "llama3":
        raise UnsupportedError(
            f"The rotary scaling {scaling.kind!r} has no spelling in a config.json.",
            "Serve it natively only.",
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def drafter_config(described: DrafterFile, target: ModelDescription) -> DrafterConfig:
    """What config.json says, for a drafter of this target."""
    layer = described.layer
    return DrafterConfig(
        hidden_size=layer.hidden_size,
        target_hidden_size=target.hidden_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        intermediate_size=layer.intermediate_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=described.draft_vocab_size,
        max_position=layer.max_position,
        norm_eps=layer.norm_eps,
        rope_theta=layer.rope_theta,
        rope_scaling=layer.rope_scaling,
        latent=layer.latent,
        score_scale=layer.score_scale,
        state_layers=described.layers,
        **described.flags,
    )
