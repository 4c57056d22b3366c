"""config.json to `ModelDescription`: every family that `models.registry` builds.

Knows the old and the new spelling of rope fields. Invariant: a field that would change the model's arithmetic
in a way this version cannot follow is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import MAX_LAYERS, Fields
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG, GIVE_MODEL, OTHER_MODEL
from firstlight.facts.description import ModelDescription, require_consistent
from firstlight.facts.hf.hf_experts import latent_attention
from firstlight.facts.hf.hf_families import (
    ALIASES,
    EVERY_LAYER,
    FAMILIES,
    LAYER_TYPES,
    NO_LAYERS,
    Family,
    refuse_unknown_arithmetic,
    with_defaults,
)
from firstlight.facts.hf.hf_rope import longest, rope_fields, rope_scaling, yarn_score_factor

# Models of text and images, whose language model is described in a section of its own.
WRAPPERS = ("kimi_k25",)
_FULL, _SLIDING = "full_attention", "sliding_attention"


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
    family = FAMILIES[model_type]
    fields, stated = with_defaults(fields, family), fields
    refuse_unknown_arithmetic(fields, family)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = fields.integer("vocab_size")
    attention_bias = fields.boolean("attention_bias", False)
    rope = rope_fields(fields)
    scaling = rope_scaling(rope, fields)
    description = ModelDescription(
        architecture=ALIASES.get(model_type, model_type),
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
        **windows(fields, family, layers),
        bos_token_id=next(iter(_ends(stated, "bos_token_id", family.ends[0], vocab_size)), None),
        eos_token_ids=_end_tokens(stated, Fields(generation, "generation_config.json"), family, vocab_size),
    )
    return require_consistent(description, where)


def _model_type(fields: Fields) -> str:
    model_type = fields.string("model_type", "")
    if not model_type:
        raise ModelFileError(
            f"{fields.where}: the field model_type is missing, so this is no language model.",
            GIVE_MODEL,
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"{fields.where}: model_type {model_type!r} is not supported.",
            f"Supported: {', '.join(FAMILIES)}.",
        )
    return model_type


def _heads(fields: Fields, family: Family, rope: Fields) -> dict[str, Any]:
    """Sizes of the attention, by the names of their fields in the description."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if family.is_latent:
        latent = latent_attention(fields)
        if fields.integer("num_key_value_heads", heads) != heads:
            raise fields.error(
                "num_key_value_heads", f"num_attention_heads ({heads}): its attention is latent"
            )
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
    head_size = _head_size(fields, hidden, heads)
    return {
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_size": head_size,
        "rotary_size": _rotary_size(fields, family, rope, head_size),
    }


def _rotary_size(fields: Fields, family: Family, rope: Fields, head_size: int) -> int | None:
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    size = int(head_size * partial)
    if family.has_rotary_size:
        size = fields.integer("rotary_dim", size, maximum=head_size)
    elif partial != 1.0:
        raise UnsupportedError(
            f"{fields.where}: partial_rotary_factor = {partial} is not supported.", OTHER_MODEL
        )
    return None if size == head_size else size


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    if fields.values.get("head_dim") is None and hidden % heads:
        raise ModelFileError(
            f"{fields.where}: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) and "
            "there is no head_dim.",
            CHECK_CONFIG,
        )
    return fields.integer("head_dim", hidden // heads or 1)


def _output_bias(family: Family, attention_bias: bool) -> bool:
    if family.output_bias is not None:
        return family.output_bias
    return attention_bias if family.qkv_bias is None else family.qkv_bias


def _end_tokens(fields: Fields, generation: Fields, family: Family, vocab_size: int) -> tuple[int, ...]:
    ids = generation.token_ids("eos_token_id", vocab_size)
    return tuple(
        dict.fromkeys(ids + _ends(fields, "eos_token_id", None if ids else family.ends[1], vocab_size))
    )


def _ends(fields: Fields, name: str, default: int | None, vocab_size: int) -> tuple[int, ...]:
    """Where the field is not there at all, transformers takes its class's default; a null means none."""
    if name in fields.values or default is None or default >= vocab_size:
        return fields.token_ids(name, vocab_size)
    return (default,)


# The sliding window of a config.json, and the layers that have it. There are four fields, and each class of
# transformers reads other ones of them; where a class reads none, its cache or another engine may. A window
# is honoured in the very layers that it is asked for, or refused by name.


def windows(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `full_layers`, by the names of their fields in the description."""
    window = _window(fields, family)
    kinds = _layer_types(fields, num_layers)
    if family.windows == NO_LAYERS and window is not None:
        raise UnsupportedError(
            f"{fields.where}: sliding_window = {window} is not supported for this model type, whose "
            "layers see everything.",
            "Set sliding_window to null if that is meant.",
        )
    if kinds is None:
        kinds = _default_types(fields, family, window, num_layers)
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    if window is None and len(full) < num_layers:
        raise ModelFileError(
            f"{fields.where}: layer_types asks for a window in {num_layers - len(full)} of {num_layers} "
            "layers, and there is none (sliding_window, use_sliding_window).",
            CHECK_CONFIG,
        )
    if family.windows == EVERY_LAYER and window is not None and full:
        raise UnsupportedError(
            f"{fields.where}: layer_types with {len(full)} of {num_layers} layers that see everything is not "
            "supported for this model type, whose layers all have the window.",
            OTHER_MODEL,
        )
    if len(full) == num_layers:
        return {"sliding_window": None}
    return {"sliding_window": window, "full_layers": full}


def _window(fields: Fields, family: Family) -> int | None:
    is_on = fields.boolean("use_sliding_window", not family.window_switch)
    if family.windows == LAYER_TYPES and not family.window_switch:
        is_on = True  # Mistral knows no switch
    has_window = is_on and fields.values.get("sliding_window") is not None
    return fields.integer("sliding_window") if has_window else None


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} kinds of layers")
    other = next((kind for kind in kinds if kind not in (_FULL, "attention", _SLIDING)), None)
    if other is not None:
        raise UnsupportedError(
            f"{fields.where}: layer_types with {str(other)[:80]!r} is not supported.",
            f"Supported: {_FULL} and {_SLIDING}.",
        )
    return [_FULL if kind == "attention" else kind for kind in kinds]  # the old name


def _default_types(fields: Fields, family: Family, window: int | None, num_layers: int) -> list[str]:
    first = 0 if window is not None else num_layers
    if window is not None and family.windows == LAYER_TYPES and family.window_switch:
        first = min(num_layers, fields.integer("max_window_layers", minimum=0))
    return [_FULL] * first + [_SLIDING] * (num_layers - first)
