"""GGUF metadata to `ModelDescription`: the architectures llama (with Mistral), qwen2 and qwen3.

Invariant: a metadata key that would change the model's arithmetic in a way this version cannot follow is an
error that names the key, never ignored.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from typing import Any

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.fields import MAX_LAYERS, Fields
from firstlight.facts.checkpoint.remedies import OTHER_MODEL
from firstlight.facts.description import ModelDescription, RopeScaling, require_consistent
from firstlight.facts.gguf.gguf_header import GgufFile
from firstlight.facts.hf.hf_rope import longest

_FLOAT32 = struct.Struct("<f")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The published Llama 3 rules (low, high, original length); others stay plain factors.
_LLAMA3_RULES = ((1.0, 4.0, 8192), (1.0, 4.0, 4096), (1.0, 4.0, 16384), (1.0, 4.0, 32768))
# Keys that change the arithmetic, and the one value at which they change nothing.
_NEUTRAL_VALUES: dict[str, object] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": None,
    "attention.sliding_window_pattern": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.temperature_scale": 0.0,
    "router_logit_softcapping": None,
    "swiglu_clamp_exp": None,
    "swiglu_clamp_shexp": None,
    "activation_sparsity_scale": None,
    "full_attention_interval": None,
}
# Every other key of these two groups is refused, whatever it may mean. The last ones are of no matter: a norm
# that these architectures do not have, a remark, what only another key or yarn reads.
_KNOWN_GROUPS = ("attention.", "rope.")
_KNOWN = frozenset(
    ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
    + ("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count")
    + ("rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor")
    + ("rope.scaling.original_context_length",)
    + ("attention.layer_norm_epsilon", "rope.scaling.finetuned", "attention.temperature_length")
    + tuple(f"rope.scaling.yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow"))
    + ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier")
)
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def describe_gguf(
    file: GgufFile, tensor_names: Collection[str], rope_factors: tuple[float, ...]
) -> ModelDescription:
    """The description of a GGUF model.

    `tensor_names` are the file's tensors in Hugging Face names (they tell of biases and tying);
    `rope_factors` are the values of the tensor rope_freqs.weight, or empty.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: the architecture {architecture!r} is not supported.",
            f"Supported GGUF architectures: {', '.join(ARCHITECTURES)} (llama covers Mistral).",
        )
    fields = Fields(file.metadata, file.path)
    _refuse_unknown_arithmetic(fields, architecture)
    sizes = _sizes(fields, architecture, file)
    stated = fields.integer(f"{architecture}.context_length")
    head_size, theta = sizes["head_size"], _plain(fields.number(f"{architecture}.rope.freq_base", 10000.0))
    scaling = _rope_scaling(fields, architecture, rope_factors, head_size, theta)
    window = fields.integer(f"{architecture}.attention.sliding_window", 0, minimum=0, maximum=1 << 40)
    description = ModelDescription(
        architecture="mistral" if architecture == "llama" and window else architecture,
        **sizes,
        norm_eps=_plain(fields.number(f"{architecture}.attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        max_position=longest(scaling, stated),
        rope_scaling=scaling,
        tie_embeddings="lm_head.weight" not in tensor_names,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensor_names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensor_names,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in tensor_names,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensor_names,
        sliding_window=window or None,
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id", sizes["vocab_size"])), None),
        eos_token_ids=_end_tokens(fields, sizes["vocab_size"]),
    )
    return require_consistent(description, file.path)


def generation_defaults(file: GgufFile) -> dict[str, float | int]:
    """Sampling defaults that newer GGUF files carry, under the names of generation_config.json."""
    defaults: dict[str, float | int] = {}
    for key, name in _SAMPLING_KEYS.items():
        value = file.metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = _plain(value) if isinstance(value, float) else value
    return defaults


def _refuse_unknown_arithmetic(fields: Fields, architecture: str) -> None:
    groups = tuple(f"{architecture}.{group}" for group in _KNOWN_GROUPS)
    for key in filter(lambda key: key.startswith(groups), fields.values):
        if key.partition(".")[2] not in _KNOWN | _NEUTRAL_VALUES.keys():
            raise UnsupportedError(f"{fields.where}: {key} is not supported.", OTHER_MODEL)
    for suffix, neutral in _NEUTRAL_VALUES.items():
        key = f"{architecture}.{suffix}"
        value = fields.values.get(key)
        if value is not None and not isinstance(value, str | int | float | list):
            value = value.tolist()  # an array of numbers
        if value is not None and value != neutral:
            hint = "Mixtures of experts are not supported yet." if suffix == "expert_count" else ""
            raise UnsupportedError(f"{fields.where}: {key} = {value} is not supported.", hint)


def _sizes(fields: Fields, architecture: str, file: GgufFile) -> dict[str, Any]:
    prefix = architecture + "."
    hidden, heads = (
        fields.integer(prefix + "embedding_length"),
        fields.integer(prefix + "attention.head_count"),
    )
    head_size = fields.integer(prefix + "attention.key_length", max(1, hidden // heads))
    for suffix in ("attention.value_length", "rope.dimension_count"):
        other = fields.integer(prefix + suffix, head_size)
        if other != head_size:
            raise UnsupportedError(
                f"{fields.where}: {prefix}{suffix} is {other} and the head size is {head_size}; only equal "
                "values are supported.",
                OTHER_MODEL,
            )
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else None
    return {
        "hidden_size": hidden,
        "num_layers": fields.integer(prefix + "block_count", maximum=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": fields.integer(prefix + "attention.head_count_kv", heads),
        "head_size": head_size,
        "intermediate_size": fields.integer(prefix + "feed_forward_length"),
        "vocab_size": vocab_size or fields.integer(prefix + "vocab_size"),
    }


def _rope_scaling(
    fields: Fields, architecture: str, factors: tuple[float, ...], head_size: int, theta: float
) -> RopeScaling:
    kind = fields.string(f"{architecture}.rope.scaling.type", "none")
    factor = _plain(
        fields.number(
            f"{architecture}.rope.scaling.factor",
            fields.number(f"{architecture}.rope.scale_linear", 1.0),  # the key of old files
        )
    )
    if kind == "none" and f"{architecture}.rope.scaling.type" not in fields.values and factor != 1.0:
        kind = "linear"
    if kind not in ("none", "linear"):
        raise UnsupportedError(
            f"{fields.where}: {architecture}.rope.scaling.type = {kind!r} is not supported.",
            "Supported: none, linear, and the factors of Llama 3 (rope_freqs.weight).",
        )
    linear = kind == "linear" and factor != 1.0
    if not factors or all(value == 1.0 for value in factors):
        original = fields.integer(
            f"{architecture}.rope.scaling.original_context_length",
            fields.integer(f"{architecture}.context_length"),
        )
        linear_scaling = RopeScaling(kind="linear", factor=factor, original_max_position=original)
        return linear_scaling if linear else RopeScaling()
    if linear:
        raise UnsupportedError(
            f"{fields.where}: linear rope scaling together with rope_freqs.weight is not supported.",
            OTHER_MODEL,
        )
    return _recognise_llama3(factors, head_size, theta) or RopeScaling(kind="factors", factors=factors)


def llama3_factors(scaling: RopeScaling, head_size: int, theta: float) -> tuple[float, ...]:
    """The divisors of the rotary frequencies that a "llama3" scaling stands for."""
    factors = []
    for index in range(head_size // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_size)
        turns = scaling.original_max_position / wavelength
        if turns > scaling.high_freq_factor:
            factors.append(1.0)
        elif turns < scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (turns - scaling.low_freq_factor) / span
            factors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return tuple(factors)


def _recognise_llama3(factors: tuple[float, ...], head_size: int, theta: float) -> RopeScaling | None:
    # The file keeps the factors in float32, made in float32 by llama.cpp's converter.
    for low, high, original in _LLAMA3_RULES:
        rule = RopeScaling(
            kind="llama3",
            factor=_plain(max(factors)),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
        expected = llama3_factors(rule, head_size, theta)
        if len(expected) == len(factors) and all(map(_is_close, expected, factors)):
            return rule
    return None


def _end_tokens(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        for token in fields.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size):
            if token not in ids:
                ids.append(token)
    return tuple(ids)


def _plain(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if _FLOAT32.pack(float(text)) == _FLOAT32.pack(value):
            return float(text)
    return value


def _is_close(expected: float, factor: float) -> bool:
    return math.isclose(expected, factor, rel_tol=2e-6)
