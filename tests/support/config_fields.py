"""Every field of transformers' configuration classes: followed, refused by name, or of no matter, and why.

Read by tests/unit/facts/hf/test_config_fields.py, which holds these lists against the classes, against what
their models' code reads, and against ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Followed:
    """Another `value` makes another model here; `beside` are fields without which it says nothing."""

    value: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Required(Followed):
    """A default would make no sense: a config.json without it is refused by name."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """Such a `value` is refused by name, the default is not."""

    value: Any


@dataclasses.dataclass(frozen=True)
class NoMatter:
    """It changes no answer, and why."""

    why: str
    value: Any = None


Verdict = Followed | Refused | NoMatter
TRAINING = "of a training"
NOT_ASKED = "what a call of transformers hands back"

OF_ALL: dict[str, Verdict] = {
    "transformers_version": NoMatter("who wrote it", "9.9"),
    "architectures": NoMatter("model_type says it; another head has other tensors", ["Other"]),
    "output_hidden_states": NoMatter(NOT_ASKED, True),
    "return_dict": NoMatter(NOT_ASKED, False),
    "dtype": NoMatter("each tensor says its own", "float16"),
    "chunk_size_feed_forward": NoMatter("memory of a step, and not read by these", 4),
    "is_encoder_decoder": Refused(True),
    "id2label": NoMatter("of classifiers", {"0": "a"}),
    "label2id": NoMatter("of classifiers", {"a": 0}),
    "problem_type": NoMatter("of classifiers", "regression"),
    "vocab_size": Required(48),
    "hidden_size": Required(128),
    "intermediate_size": Required(40),
    "num_hidden_layers": Required(5),
    "num_attention_heads": Required(8),
    "num_key_value_heads": Followed(4),
    "hidden_act": Refused("gelu"),
    "max_position_embeddings": Required(777),
    "initializer_range": NoMatter(TRAINING, 0.5),
    "rms_norm_eps": Followed(0.125),
    "use_cache": NoMatter("there is always one", False),
    "pad_token_id": NoMatter("a row of the embedding that is not trained; prompts are never filled up", 7),
    "bos_token_id": Followed(9),
    "eos_token_id": Followed(9),
    "tie_word_embeddings": Followed(True),
    "rope_parameters": Followed({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "attention_dropout": NoMatter(TRAINING, 0.5),
}
OLD_TP = NoMatter("the same products in pieces", 2)
ROUTER: dict[str, Verdict] = {
    "output_router_logits": NoMatter(NOT_ASKED, True),
    "router_aux_loss_coef": NoMatter(TRAINING, 0.5),
}
WINDOW = Followed(17)
ON = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
SWITCHED: dict[str, Verdict] = {
    "use_sliding_window": Followed(False, ON),
    "sliding_window": Followed(17, ON),
}
BY_LAYER: dict[str, Verdict] = SWITCHED | {
    "max_window_layers": Followed(1, ON),
    "layer_types": Followed(["sliding_attention", "full_attention"], ON),
}
LATENT: dict[str, Verdict] = {
    "num_key_value_heads": Refused(2),  # of latent attention there are as many as heads
    "pretraining_tp": OLD_TP,
    "attention_bias": Refused(True),
    "kv_lora_rank": Required(48),
    "q_lora_rank": Followed(24),
    "qk_nope_head_dim": Required(12),
    "qk_rope_head_dim": Required(8),
    "v_head_dim": Required(28),
    "n_routed_experts": Followed(24),
    "n_shared_experts": Followed(3),
    "moe_intermediate_size": Required(40),
    "first_k_dense_replace": Followed(2),
    "routed_scaling_factor": Followed(3.5),
    "output_router_logits": ROUTER["output_router_logits"],
}
GROUPS = {"n_group": 2, "topk_group": 1}
FIELDS: dict[str, dict[str, Verdict]] = {
    "llama": {
        "head_dim": Followed(8),
        "attention_bias": Followed(True),
        "mlp_bias": Followed(True),
        "pretraining_tp": OLD_TP,
    },
    "mistral": {"head_dim": Followed(8), "sliding_window": WINDOW},
    "qwen2": BY_LAYER,
    "qwen3": BY_LAYER | {"head_dim": Followed(8), "attention_bias": Followed(True)},
    "qwen3_moe": SWITCHED | ROUTER | {
        "attention_bias": Followed(True),
        "decoder_sparse_step": Followed(2),
        "mlp_only_layers": Followed([0]),
        "moe_intermediate_size": Required(40),
        "num_experts": Followed(12),
        "num_experts_per_tok": Followed(3),
        "norm_topk_prob": Followed(True),
    },
    "mixtral": ROUTER | {
        "head_dim": Followed(8),
        "sliding_window": WINDOW,
        "num_local_experts": Followed(12),
        "num_experts_per_tok": Followed(3),
        "router_jitter_noise": NoMatter(TRAINING, 0.5),
    },
    "minimax_m2": ROUTER | {
        "head_dim": Followed(32),
        "num_local_experts": Followed(12),
        "num_experts_per_tok": Followed(3),
        "router_jitter_noise": NoMatter(TRAINING, 0.5),
    },
    "deepseek_v2": LATENT | {
        "head_dim": NoMatter("the class puts qk_rope_head_dim into it", 99),
        "mlp_bias": Refused(True),
        "num_experts_per_tok": Required(2),
        "topk_method": Followed("group_limited_greedy", GROUPS),
        "n_group": Followed(4, {"topk_method": "group_limited_greedy", **GROUPS}),
        "topk_group": Followed(2, {"topk_method": "group_limited_greedy", **GROUPS}),
        "norm_topk_prob": Refused(True),  # its own code and transformers do not agree about it
    },
    "deepseek_v3": LATENT | {
        "num_experts_per_tok": Followed(2),
        "n_group": Followed(2),
        "topk_group": Followed(1),
        "norm_topk_prob": Followed(False),
        "rope_interleave": Refused(False),
        "num_mtp_layers": NoMatter("guesses of further tokens, which are checked, and skipped here", 2),
    },
}  # fmt: skip
FIELDS["ministral"] = FIELDS["mistral"] | {
    "layer_types": Followed(["sliding_attention", "full_attention"], {"sliding_window": 16})
}
FIELDS["kimi_k2"] = FIELDS["deepseek_v3"]

# Of Kimi-K2.5, beside the section about text, which is one of those above.
OF_IMAGES = NoMatter("only text is served", 1)
OF_WRAPPER: dict[str, Verdict] = {
    "vision_config": NoMatter("only text is served", {"hidden_size": 1}),
    "projection_hidden_size": OF_IMAGES,
    "projection_layer_norm_eps": OF_IMAGES,
    "image_token_id": OF_IMAGES,
    "video_token_id": OF_IMAGES,
    "vision_start_token_id": OF_IMAGES,
    "vision_end_token_id": OF_IMAGES,
    "tie_word_embeddings": NoMatter(
        "the section about text says it, and the head is there and differs", True
    ),
}

# What models' code and the code that all share read without a class declaring it.
READ_BESIDE: dict[str, Verdict] = {
    "is_causal": Refused(False),
    "attention_chunk_size": Refused(64),
    "per_layer_config": Refused({"0": {"num_key_value_heads": 1}}),
    "layer_types": Refused(["sliding_attention", "chunked_attention"]),
    "sliding_window": Refused(64),
    "partial_rotary_factor": Refused(0.5),
    "num_experts": NoMatter("another name of a declared field, or refused in dense models"),
    "num_local_experts": NoMatter("another name of a declared field, or refused in dense models"),
    "head_dim": NoMatter("where a class does not declare it, its models and we read it alike"),
    "kv_sharing_modes": NoMatter("of other models: whoever declares it decides"),
    "number_of_conv_states": NoMatter("of layers that are no attention"),
}
# Methods and private attributes of configurations.
NO_FIELDS = {
    "_attn_implementation", "_experts_implementation", "default_theta", "get_text_config",
    "standardize_rope_params", "validate_rope", "json",
}  # fmt: skip
