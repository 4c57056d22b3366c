"""Configurations with experts and latent attention: published fields, the way back, refusals by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.description import Experts, LatentAttention
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.hf.hf_config_writer import hf_config
from firstlight.facts.planning.outline import open_outline
from support.experts import description_of

# What the files of Kimi-K2.5 say of its language model.
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5, "vocab_size": 163840,
    "max_position_embeddings": 262144, "rope_theta": 50000.0, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


# What config.json of MiniMax-M2 says.
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": 3072,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 1536, "mlp_intermediate_size": 8192, "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "num_local_experts": 256, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "rotary_dim": 64, "attn_type_list": [1] * 62, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
    "vocab_size": 200064, "max_position_embeddings": 196608, "sliding_window": None, "use_mtp": True,
    "tie_word_embeddings": False, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
    "layernorm_full_attention_beta": 1.0,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip


def test_minimax_m2_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAX))
    outline = open_outline(str(tmp_path))
    assert outline.description.turned_size == 64
    assert outline.description.experts == Experts(
        num=256, num_chosen=8, inner_size=1536, scoring="sigmoid", has_bias=True
    )
    formats = {group.name: group.format for group in outline.groups}
    assert formats["model.layers.#.self_attn.q_proj.weight"] == "F8_E4M3"
    assert formats["lm_head.weight"] == "BF16"


def test_kimi_k25_is_described_by_its_text_config() -> None:
    wrapped = {"model_type": "kimi_k25", "text_config": KIMI, "tie_word_embeddings": True}
    description = describe_hf(wrapped, {})
    assert description == describe_hf(KIMI, {})
    assert description.latent == LatentAttention(
        query_rank=1536, latent_size=512, nope_size=128, rope_size=64, value_size=128
    )
    assert description.experts == Experts(
        num=384, num_chosen=8, inner_size=2048, shared_size=2048, dense_layers=(0,), scoring="sigmoid",
        has_bias=True, scale=2.827,
    )  # fmt: skip
    assert not description.tie_embeddings
    # 192^-0.5 times (0.1 ln 64 + 1)^2, which is 2.005; cos and sin stay as they are.
    assert description.score_scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    assert description.score_scale == pytest.approx(192**-0.5 * 2.005, rel=1e-3)
    assert description.rope_scaling.turn_factor == 1.0
    assert (description.head_size, description.turned_size) == (192, 64)


@pytest.mark.parametrize("architecture", ["kimi_k2", "qwen3_moe", "mixtral", "minimax_m2"])
def test_a_description_comes_back_from_its_configuration(architecture: str) -> None:
    description = description_of(architecture)
    found = describe_hf(hf_config(description, "float32"), {})
    assert found.score_scale == pytest.approx(description.score_scale)
    assert found.rope_scaling == description.rope_scaling
    assert (found.experts, found.latent) == (description.experts, description.latent)
    assert found.turned_size == description.turned_size
    assert found.whole_qk_norm == description.whole_qk_norm


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"scoring_func": "tanh"}, "scoring_func = tanh"),
        ({"model_type": "deepseek_v2", "topk_method": "greedy"}, "scoring_func = sigmoid"),
        (
            {"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax"},
            "norm_topk_prob = True",
        ),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_another_arithmetic_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        describe_hf(KIMI | changes, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 7}, "384 experts do not fall into 7 groups"),
        ({"n_group": 384, "topk_group": 8}, "do not fall"),  # a group of one has no two best
        ({"n_group": 96, "topk_group": 1}, "chooses 8 experts, and 4 can be chosen"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": 63}, "63 values of a head of 191 turn"),
    ],
)
def test_fields_that_contradict_are_errors(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        describe_hf(KIMI | changes, {})


def test_a_dense_model_with_experts_in_its_fields_is_refused() -> None:
    fields = {key: value for key, value in KIMI.items() if key != "auto_map"} | {"num_local_experts": 8}
    with pytest.raises(UnsupportedError, match="num_local_experts = 8"):
        describe_hf(fields | {"model_type": "llama", "rope_scaling": None}, {})
