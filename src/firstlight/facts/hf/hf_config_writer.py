"""`ModelDescription` back to config.json and generation_config.json, as transformers and vLLM read them.

Invariant: `describe_hf(hf_config(d), ...)` gives `d` back, or `hf_config` refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.base.errors import UnsupportedError
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_experts_writer import expert_fields, yarn_fields
from firstlight.facts.hf.hf_rope import stated_positions

_SERVE_IT = "Serve the GGUF file itself: firstlight needs no conversion."
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


def hf_class(description: ModelDescription) -> str:
    """What transformers calls the model's class."""
    return _CLASSES[description.architecture]


def hf_config(description: ModelDescription, dtype: str, pad_token_id: int | None = None) -> dict[str, Any]:
    """The content of config.json; `dtype` is torch's name ("bfloat16").

    Raises `UnsupportedError` where the Hugging Face class of the architecture cannot express the model.
    """
    _require_expressible(description)
    config: dict[str, Any] = {
        "architectures": [hf_class(description)],
        "model_type": description.architecture,
        "hidden_size": description.hidden_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_size,
        "intermediate_size": description.intermediate_size,
        "vocab_size": description.vocab_size,
        "max_position_embeddings": stated_positions(description.rope_scaling, description.max_position),
        "rms_norm_eps": description.norm_eps,
        "rope_theta": description.rope_theta,
        "rope_scaling": _rope_scaling(description),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": description.tie_embeddings,
        "bos_token_id": description.bos_token_id,
        "eos_token_id": _one_or_many(description.eos_token_ids),
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
    }
    if description.architecture == "llama":
        config |= {"attention_bias": description.attention_bias, "mlp_bias": description.mlp_bias}
    if description.architecture in ("mistral", "mixtral"):
        config["sliding_window"] = description.sliding_window
    if description.full_layers:
        config["layer_types"] = [
            "full_attention" if layer in description.full_layers else "sliding_attention"
            for layer in range(description.num_layers)
        ]
    if description.architecture in ("qwen3", "qwen3_moe"):
        config["attention_bias"] = description.attention_bias
    if description.architecture in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {
            "use_sliding_window": description.sliding_window is not None,
            "sliding_window": description.sliding_window,
            "max_window_layers": 0 if description.sliding_window else description.num_layers,
        }
    return config | expert_fields(description)


def hf_generation_config(
    description: ModelDescription, defaults: Mapping[str, Any], pad_token_id: int | None = None
) -> dict[str, Any]:
    """The content of generation_config.json: special tokens, and sampling defaults where the file has
    them."""
    config: dict[str, Any] = {
        "bos_token_id": description.bos_token_id,
        "eos_token_id": _one_or_many(description.eos_token_ids),
        "pad_token_id": pad_token_id,
    }
    present = {name: value for name, value in config.items() if value is not None}
    return present | ({"do_sample": True, **defaults} if defaults else {})


def _require_expressible(description: ModelDescription) -> None:
    name = _CLASSES[description.architecture]
    if description.rope_scaling.kind == "factors":
        raise UnsupportedError(
            f"The rotary factors of this model follow no rule that the config.json of {name} can express.",
            _SERVE_IT,
        )
    plain = (False, False, False, False)
    normed = (description.attention_bias, description.attention_bias, False, True)
    expected = {  # (attention bias, output bias, mlp bias, norm on q and k)
        "llama": (description.attention_bias, description.attention_bias, description.mlp_bias, False),
        "qwen2": (True, False, False, False),
        "qwen3": normed,
        "qwen3_moe": normed,
    }.get(description.architecture, plain)
    found = (
        description.attention_bias,
        description.output_bias,
        description.mlp_bias,
        description.qk_norm,
    )
    if found != expected:
        raise UnsupportedError(
            f"This model has other biases or norms than {name} (bias on q, k and v: {found[0]}, on o: "
            f"{found[1]}, in the MLP: {found[2]}; norm on q and k: {found[3]}).",
            _SERVE_IT,
        )


def _rope_scaling(description: ModelDescription) -> dict[str, Any] | None:
    scaling = description.rope_scaling
    if scaling.kind == "none":
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return yarn_fields(scaling, description.head_size, description.score_scale)
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
