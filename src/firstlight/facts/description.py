"""What a model is, in one struct: parsed from config.json or GGUF metadata, read by everything above.

The only place with defaults of model configurations. Torch-free. Invariant: a `ModelDescription` is complete
and consistent (head counts divide, sizes are positive), or its maker raised an error that names the field.
"""

from __future__ import annotations

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.facts.remedies import CHECK_CONFIG


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of rotary frequencies.

    "none", "linear" (`factor`), "llama3" (all numbers), or "factors": the i-th frequency is divided by
    `factors[i]` (head_size / 2 of them). GGUF files carry the last; the reader turns it into "llama3" where
    the factors are exactly those of that rule.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of one decoder-only transformer. `architecture` is the key of models.registry."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on each head of q and k, before the rotary embedding
    sliding_window: int | None = None  # a token sees itself and the window-1 before it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def require_consistent(description: ModelDescription, where: str) -> ModelDescription:
    """Hands the description back, or raises a `ModelFileError` about fields of `where` that contradict."""
    heads, kv_heads = description.num_heads, description.num_kv_heads
    if heads % kv_heads:
        raise ModelFileError(
            f"{where}: the number of attention heads ({heads}) is not a multiple of the number of "
            f"key-value heads ({kv_heads}).",
            CHECK_CONFIG,
        )
    if description.head_size % 2:
        raise ModelFileError(
            f"{where}: the head size is {description.head_size}; rotary embeddings need an even one.",
            CHECK_CONFIG,
        )
    factors = description.rope_scaling.factors
    if description.rope_scaling.kind == "factors" and len(factors) != description.head_size // 2:
        raise ModelFileError(
            f"{where}: {len(factors)} rotary factors for a head size of {description.head_size}.",
            CHECK_CONFIG,
        )
    return description
