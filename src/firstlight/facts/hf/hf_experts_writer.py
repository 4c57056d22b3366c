"""Latent attention, experts and yarn back to fields of config.json.

Invariant: `hf_experts` and `hf_rope` read the same from these fields.
"""

from __future__ import annotations

import math
from typing import Any

from firstlight.facts.description import Experts, LatentAttention, ModelDescription, RopeScaling

_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def expert_fields(description: ModelDescription) -> dict[str, Any]:
    """What a family with experts has beside the fields of a dense one; nothing for the others."""
    experts = description.experts
    if description.architecture in _DEEPSEEK:
        assert description.latent is not None, "DeepSeek's attention is latent"
        return latent_fields(description.latent) | _deepseek_fields(description.architecture, experts)
    if experts is None:
        return {}
    chosen: dict[str, Any] = {"num_experts_per_tok": experts.num_chosen}
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


def yarn_fields(scaling: RopeScaling, head_size: int, score_scale: float | None) -> dict[str, Any]:
    """The rope section of a yarn scaling. `score_scale`: of latent attention, which says it by mscale."""
    fields: dict[str, Any] = {
        "type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    fields |= {"attention_factor": scaling.turn_factor}
    if score_scale is None:
        return fields
    all_dim = 10.0 * (math.sqrt(score_scale * head_size**0.5) - 1.0) / math.log(scaling.factor)
    return fields | {"mscale": round(all_dim, 6), "mscale_all_dim": round(all_dim, 6)}


def latent_fields(latent: LatentAttention) -> dict[str, Any]:
    """The sizes of latent attention."""
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
