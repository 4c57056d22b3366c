"""Fields of config.json about latent attention and about experts, for the families that have them.

Invariant: a field that would change which experts are chosen, or how they are weighed, in a way this version
cannot follow is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.remedies import OTHER_MODEL
from firstlight.facts.description import Experts, LatentAttention

ReadExperts = Callable[[Fields, int], Experts | None]  # of a number of layers


def latent_attention(fields: Fields) -> LatentAttention:
    """DeepSeek's attention. Rotary pairs lie side by side in its checkpoints."""
    _require(fields, "rope_interleave", True)
    _require(fields, "attention_bias", False)
    has_rank = fields.values.get("q_lora_rank") is not None
    return LatentAttention(
        query_rank=fields.integer("q_lora_rank") if has_rank else None,
        latent_size=fields.integer("kv_lora_rank"),
        nope_size=fields.integer("qk_nope_head_dim"),
        rope_size=fields.integer("qk_rope_head_dim"),
        value_size=fields.integer("v_head_dim"),
    )


def deepseek_experts(fields: Fields, num_layers: int) -> Experts | None:
    """DeepSeek-V2, V3 and Kimi: V2 scores by softmax, and judges a group by its best expert."""
    if fields.values.get("n_routed_experts") is None:
        return None
    _require(fields, "moe_layer_freq", 1)
    is_v2 = fields.string("model_type") == "deepseek_v2"
    method = fields.string("topk_method", "greedy" if is_v2 else "noaux_tc")
    if method not in (("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)):
        raise UnsupportedError(f"{fields.where}: topk_method {method!r} is not supported.", OTHER_MODEL)
    inner = fields.integer("moe_intermediate_size")
    _require(fields, "scoring_func", "softmax" if is_v2 else "sigmoid")  # else is never read
    if is_v2:
        _require(fields, "norm_topk_prob", False)  # transformers and DeepSeek's code do not agree
    num_groups = 1 if method == "greedy" else fields.integer("n_group", 1)
    num_dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    return Experts(
        num=fields.integer("n_routed_experts"),
        num_chosen=fields.integer("num_experts_per_tok"),
        inner_size=inner,
        shared_size=inner * fields.integer("n_shared_experts", 0, minimum=0),
        dense_layers=tuple(range(min(num_dense, num_layers))),
        scoring="softmax" if is_v2 else "sigmoid",
        has_bias=not is_v2,
        num_groups=num_groups,
        num_chosen_groups=1 if num_groups == 1 else fields.integer("topk_group"),
        num_group_scores=1 if is_v2 or num_groups == 1 else 2,
        normalises=not is_v2 and fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0 if is_v2 else 2.5),
    )


def qwen3_experts(fields: Fields, num_layers: int) -> Experts:
    """Qwen3-MoE: some layers may be dense."""
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.values.get("mlp_only_layers") or []
    dense = [layer for layer in range(num_layers) if layer in named or (layer + 1) % step]
    return Experts(
        num=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        inner_size=fields.integer("moe_intermediate_size"),
        dense_layers=tuple(dense),
        normalises=fields.boolean("norm_topk_prob", False),
    )


def mixtral_experts(fields: Fields, num_layers: int) -> Experts:
    """Mixtral: softmax over all, and the chosen ones' weights add up to 1."""
    return Experts(
        num=fields.integer("num_local_experts", 8),
        num_chosen=fields.integer("num_experts_per_tok", 2),
        inner_size=fields.integer("intermediate_size"),
    )


def minimax_experts(fields: Fields, num_layers: int) -> Experts:
    """MiniMax-M2: DeepSeek's sigmoid and bias, without groups and shared experts."""
    _require(fields, "shared_intermediate_size", 0)
    _require(fields, "use_routing_bias", True)
    _require(fields, "qk_norm_type", "per_layer")
    _require(fields, "use_qk_norm", True)
    if any(kind != 1 for kind in fields.values.get("attn_type_list") or ()):
        raise UnsupportedError(
            f"{fields.where}: attn_type_list with other than 1 is not supported.", OTHER_MODEL
        )
    return Experts(
        num=fields.integer("num_local_experts", 256),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        inner_size=fields.integer("intermediate_size"),
        scoring=_scoring(fields, fields.string("scoring_func", "sigmoid")),
        has_bias=True,
    )


def _scoring(fields: Fields, name: str) -> str:
    if name not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"{fields.where}: scoring_func {name!r} is not supported.", OTHER_MODEL)
    return name


def _require(fields: Fields, name: str, only: object) -> None:
    value = fields.values.get(name, only)
    if value is not None and value != only:
        raise UnsupportedError(f"{fields.where}: {name} = {str(value)[:80]} is not supported.", OTHER_MODEL)
