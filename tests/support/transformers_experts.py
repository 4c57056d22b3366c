"""Tiny configurations of models with experts and with latent attention, for the tests of parity.

Beside `transformers_models`, whose random weights they share. Every size is different from every other, so
that no two can be mistaken for each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    MiniMaxM2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from support.transformers_models import BASE, randomise, save

LATENT: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 16}
# As Kimi-K2 has it, with 64 original positions, so that a prompt of a test goes beyond them.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_OF_V2 = {**YARN, "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 0.5}
YARN_WITHOUT_MSCALE = {k: v for k, v in YARN.items() if not k.startswith("mscale")}


def _config(kind: type[PreTrainedConfig], base: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    return kind(**{**base, **changes})


def _v3(**changes: Any) -> PreTrainedConfig:
    return _config(DeepseekV3Config, LATENT, **changes)


def _v2(**changes: Any) -> PreTrainedConfig:
    return _config(DeepseekV2Config, LATENT, **{"topk_method": "greedy", **changes})


CONFIGS: dict[str, PreTrainedConfig] = {
    "deepseek v3": _v3(),
    "deepseek v3 in groups": _v3(**GROUPS),
    "deepseek v3 yarn": _v3(rope_parameters=YARN),
    "deepseek v3 yarn in groups, 3 dense": _v3(**GROUPS, rope_parameters=YARN, first_k_dense_replace=3),
    "deepseek v3 tied": _v3(tie_word_embeddings=True),
    "deepseek v3 without a norm of the weights": _v3(norm_topk_prob=False, routed_scaling_factor=1.5),
    "deepseek v3 without a query rank": _v3(q_lora_rank=None, n_shared_experts=2),
    "deepseek v3 large epsilon": _v3(rms_norm_eps=1e-2),
    "deepseek v2": _v2(),
    "deepseek v2 in groups": _v2(**GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=4.0),
    "deepseek v2 lite yarn": _v2(q_lora_rank=None, n_shared_experts=2, rope_parameters=YARN_OF_V2),
    "qwen3 moe": _config(
        Qwen3MoeConfig, BASE, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48
    ),
    "qwen3 moe normalised, some layers dense, yarn": _config(
        Qwen3MoeConfig, BASE, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        num_hidden_layers=4, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=2,
        rope_parameters=YARN_WITHOUT_MSCALE,
    ),
    "qwen3 moe, a window in every layer": _config(
        Qwen3MoeConfig, BASE, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48,
        use_sliding_window=True, sliding_window=24, max_window_layers=2,
    ),
    "mixtral": _config(MixtralConfig, BASE, num_local_experts=6, num_experts_per_tok=2),
    "mixtral window": _config(MixtralConfig, BASE, num_local_experts=4, sliding_window=24),
    "minimax m2": _config(
        MiniMaxM2Config, BASE, head_dim=24, num_local_experts=8, num_experts_per_tok=3, rotary_dim=8
    ),
}  # fmt: skip


def save_kimi_k25(model: Any, folder: Path) -> None:
    """As `save`, with the publisher's names: transformers writes "blocks" for "layers" of text, too."""
    save(model, folder)
    path = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): values
        for name, values in load_file(path).items()
    }
    assert "language_model.model.layers.1.mlp.experts.0.gate_proj.weight" in tensors
    save_file(tensors, path, metadata={"format": "pt"})


def kimi_k25() -> Any:
    """The wrapper of text and images around a tiny Kimi, with random weights."""
    text = {**LATENT, **GROUPS, "rope_parameters": YARN, "model_type": "deepseek_v3"}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = Kimi_K25Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return randomise(Kimi_K25ForConditionalGeneration(config).float().eval(), seed=5)
