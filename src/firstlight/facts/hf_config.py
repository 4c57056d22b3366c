"""config.json to `ModelDescription`: every family that `models.registry` builds.

Called by `hf_checkpoint`. Knows the old and the new spelling of rope fields. Invariant: a field that would
change the model's arithmetic in a way this version cannot follow is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.description import ModelDescription, require_consistent
from firstlight.facts.fields import MAX_LAYERS, Fields
from firstlight.facts.hf_experts import (
    ReadExperts,
    deepseek_experts,
    latent_attention,
    minimax_experts,
    mixtral_experts,
    qwen3_experts,
)
from firstlight.facts.hf_rope import longest, rope_fields, rope_scaling, yarn_score_factor
from firstlight.facts.remedies import CHECK_CONFIG, GIVE_MODEL, OTHER_MODEL


@dataclass(frozen=True)
class _Family:
    """What `transformers` assumes for a model type where config.json is silent."""

    qkv_bias: bool | None = None  # None: config.json's attention_bias says
    output_bias: bool | None = None  # None: as attention_bias
    head_size: int | None = None  # None: hidden size divided by heads
    num_kv_heads: int | None = None  # None: as many as heads
    sliding_window: int | None = None
    window_switch: bool = False  # use_sliding_window and max_window_layers are read
    window_if_named: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    mlp_bias: bool = False  # whether the field mlp_bias is read
    rope_theta: float = 10000.0
    is_latent: bool = False
    experts: ReadExperts | None = None
    has_rotary_size: bool = False  # rotary_dim or partial_rotary_factor are read
    has_known_code: bool = False  # auto_map names code that was published with it, and that this replaces


_FAMILIES = {
    "llama": _Family(mlp_bias=True),
    "mistral": _Family(qkv_bias=False, num_kv_heads=8, sliding_window=4096),
    "qwen2": _Family(qkv_bias=True, output_bias=False, window_switch=True, sliding_window=4096),
    "qwen3": _Family(window_switch=True, sliding_window=4096, head_size=128, qk_norm=True),
    "qwen3_moe": _Family(window_switch=True, sliding_window=4096, qk_norm=True, experts=qwen3_experts),
    "mixtral": _Family(
        qkv_bias=False, num_kv_heads=8, window_if_named=True, rope_theta=1e6, experts=mixtral_experts
    ),
    "minimax_m2": _Family(
        qkv_bias=False,
        num_kv_heads=8,
        head_size=128,
        whole_qk_norm=True,
        rope_theta=5e6,
        experts=minimax_experts,
        has_rotary_size=True,
        has_known_code=True,
    ),
} | dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "kimi_k2"),
    _Family(qkv_bias=False, is_latent=True, experts=deepseek_experts, has_known_code=True),
)
# Models of text and images, whose language model is described in a section of its own.
WRAPPERS = ("kimi_k25",)
# Fields that change the arithmetic, and the values at which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "no_rope_layers": (),
}
_WITHOUT_EXPERTS: dict[str, tuple[Any, ...]] = {"num_local_experts": (0, 1), "num_experts": (0,)}


def describe_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], where: str = "config.json"
) -> ModelDescription:
    """The description of a Hugging Face model from its config.json and (possibly empty)
    generation_config.json."""
    fields = Fields(config, where)
    if fields.string("model_type", "") in WRAPPERS:
        # Some exports say outside how the weights are packed.
        packing = {"quantization_config": config.get("quantization_config")}
        fields = Fields({**packing, **fields.mapping("text_config")}, f"{where}: text_config")
    model_type = _model_type(fields)
    family = _FAMILIES[model_type]
    _refuse_unknown_arithmetic(fields, family)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = fields.integer("vocab_size")
    attention_bias = fields.boolean("attention_bias", False)
    rope = rope_fields(fields)
    scaling = rope_scaling(rope, fields)
    description = ModelDescription(
        architecture=model_type,
        hidden_size=fields.integer("hidden_size"),
        num_layers=layers,
        **_heads(fields, family, rope),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab_size,
        max_position=longest(scaling, fields.integer("max_position_embeddings")),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", family.rope_theta)),
        rope_scaling=scaling,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=_output_bias(family, attention_bias),
        mlp_bias=fields.boolean("mlp_bias", False) if family.mlp_bias else False,
        qk_norm=family.qk_norm,
        whole_qk_norm=family.whole_qk_norm,
        experts=None if family.experts is None else family.experts(fields, layers),
        sliding_window=_sliding_window(fields, family, layers),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=_end_tokens(fields, Fields(generation, "generation_config.json"), vocab_size),
    )
    return require_consistent(description, where)


def _model_type(fields: Fields) -> str:
    model_type = fields.string("model_type", "")
    if not model_type:
        raise ModelFileError(
            f"{fields.where}: the field model_type is missing, so this is no language model.",
            GIVE_MODEL,
        )
    if model_type not in _FAMILIES:
        raise UnsupportedError(
            f"{fields.where}: model_type {model_type!r} is not supported.",
            f"Supported: {', '.join(_FAMILIES)}.",
        )
    return model_type


def _refuse_unknown_arithmetic(fields: Fields, family: _Family) -> None:
    neutral_values = dict(_NEUTRAL_VALUES)
    if family.experts is None:
        neutral_values |= _WITHOUT_EXPERTS
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


def _heads(fields: Fields, family: _Family, rope: Fields) -> dict[str, Any]:
    """Sizes of the attention, by the names of their fields in the description."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if family.is_latent:
        latent = latent_attention(fields)
        size = latent.nope_size + latent.rope_size
        factor = yarn_score_factor(rope, rope_scaling(rope, fields))
        return {
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_size": size,
            "rotary_size": latent.rope_size,
            "score_scale": size**-0.5 * factor,
            "latent": latent,
        }
    head_size = _head_size(fields, family, hidden, heads)
    return {
        "num_heads": heads,
        "num_kv_heads": _num_kv_heads(fields, family, heads),
        "head_size": head_size,
        "rotary_size": _rotary_size(fields, family, rope, head_size),
    }


def _rotary_size(fields: Fields, family: _Family, rope: Fields, head_size: int) -> int | None:
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    size = int(head_size * partial)
    if family.has_rotary_size:
        size = fields.integer("rotary_dim", size, maximum=head_size)
    elif partial != 1.0:
        raise UnsupportedError(
            f"{fields.where}: partial_rotary_factor = {partial} is not supported.", OTHER_MODEL
        )
    return None if size == head_size else size


def _num_kv_heads(fields: Fields, family: _Family, heads: int) -> int:
    if "num_key_value_heads" in fields.values:
        return fields.integer("num_key_value_heads", heads)
    return family.num_kv_heads or heads


def _head_size(fields: Fields, family: _Family, hidden: int, heads: int) -> int:
    explicit = fields.values.get("head_dim") is not None
    if not explicit and family.head_size is None and hidden % heads:
        raise ModelFileError(
            f"{fields.where}: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) and "
            "there is no head_dim.",
            CHECK_CONFIG,
        )
    return fields.integer("head_dim", family.head_size or hidden // heads)


def _output_bias(family: _Family, attention_bias: bool) -> bool:
    if family.output_bias is not None:
        return family.output_bias
    return attention_bias if family.qkv_bias is None else family.qkv_bias


def _sliding_window(fields: Fields, family: _Family, layers: int) -> int | None:
    """The window that all layers share, or None. Models that mix layers are refused."""
    if family.window_if_named:
        named = fields.values.get("sliding_window") is not None
        return fields.integer("sliding_window") if named else None
    if family.sliding_window is None:
        return None
    if family.window_switch and not fields.boolean("use_sliding_window", False):
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", family.sliding_window)
    if not family.window_switch:
        return window
    num_windowed = layers - min(layers, fields.integer("max_window_layers", 28, minimum=0))
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        num_windowed = sum(kind == "sliding_attention" for kind in kinds)
    if 0 < num_windowed < layers:
        raise UnsupportedError(
            f"{fields.where}: a sliding window in {num_windowed} of {layers} layers (max_window_layers, "
            "layer_types) is not supported.",
            "Set use_sliding_window to false if prompts stay shorter than the window.",
        )
    return window if num_windowed else None


def _end_tokens(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = generation.token_ids("eos_token_id", vocab_size) + fields.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))
