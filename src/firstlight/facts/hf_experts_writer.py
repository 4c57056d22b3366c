"""Latent attention, experts and yarn back to fields of config.json. Used by `hf_config_writer`.

Invariant: `hf_experts` and `hf_rope` read the same from these fields.
"""

from __future__ import annotations

import math
from typing import Any

from firstlight.facts.description import Experts, ModelDescription

_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def expert_fields(description: ModelDescription) -> dict[str, Any]:
    """What a family with experts has beside the fields of a dense one; nothing for the others."""
    experts = description.experts
    if description.architecture in _DEEPSEEK:
        return _latent_fields(description) | _deepseek_fields(description.architecture, experts)
    if experts is None:
        return {}
    chosen = {"num_experts_per_tok": experts.num_chosen}
    if description.architecture == "qwen3_moe":
        return chosen | {
            "num_experts": experts.num,
            "moe_intermediate_size": experts.inner_size,
            "mlp_only_layers": list(experts.dense_layers),
            "decoder_sparse_step": 1,
            "norm_topk_prob": experts.normalises,
        }
    fields = chosen | {"num_local_experts": experts.num, "intermediate_size": experts.inner_size}
    if description.architecture == "minimax_m2":
        fields |= {"rotary_dim": description.turned_size, "scoring_func": experts.scoring}
        fields |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}
    return fields


def yarn_fields(description: ModelDescription) -> dict[str, Any]:
    """The rope section of a yarn scaling. With latent attention mscale and mscale_all_dim are the same."""
    scaling = description.rope_scaling
    fields: dict[str, Any] = {
        "type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    if description.latent is None:
        return fields | {"attention_factor": scaling.turn_factor}
    by_size = (description.score_scale or 0.0) * description.head_size**0.5
    all_dim = 10.0 * (math.sqrt(by_size) - 1.0) / math.log(scaling.factor)
    all_dim = round(all_dim, 6)
    return fields | {"mscale": all_dim, "mscale_all_dim": all_dim}


def _latent_fields(description: ModelDescription) -> dict[str, Any]:
    latent = description.latent
    assert latent is not None, "DeepSeek's attention is latent"
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.latent_size,
        "qk_nope_head_dim": latent.nope_size,
        "qk_rope_head_dim": latent.rope_size,
        "v_head_dim": latent.value_size,
        "head_dim": latent.rope_size,  # as transformers writes it
    }


def _deepseek_fields(architecture: str, experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {"n_routed_experts": None}
    method = "noaux_tc"
    if architecture == "deepseek_v2":
        method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
    return {
        "n_routed_experts": experts.num,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.inner_size,
        "n_shared_experts": experts.shared_size // experts.inner_size,
        "first_k_dense_replace": len(experts.dense_layers),
        "moe_layer_freq": 1,
        "scoring_func": experts.scoring,
        "topk_method": method,
        "n_group": experts.num_groups,
        "topk_group": experts.num_chosen_groups,
        "norm_topk_prob": experts.normalises,
        "routed_scaling_factor": experts.scale,
        "num_nextn_predict_layers": 0,
    }
