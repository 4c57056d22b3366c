"""What a model is, in one struct: parsed from config.json or GGUF metadata, read by everything above.

The only place with defaults of model configurations. Torch-free. Invariant: a `ModelDescription` is complete
and consistent (head counts divide, sizes are positive), or its maker raised an error that names the field.
"""

from __future__ import annotations

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of rotary frequencies.

    "none", "linear" (`factor`), "llama3", "yarn", or "factors": the i-th frequency is divided by
    `factors[i]` (head_size / 2 of them). GGUF files carry the last; the reader turns it into "llama3" where
    the factors are exactly those of that rule. `turn_factor` multiplies cos and sin (yarn's attention
    factor).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # before the scaling; not of "factors"
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0  # yarn: pairs that turn so often within the original positions are kept
    beta_slow: float = 1.0  # and those that turn less often than this are stretched
    truncate: bool = True  # yarn: the bounds between them are whole pairs
    turn_factor: float = 1.0


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: all heads' keys and values come from one latent and one rotary key.

    A query or key of a head is `nope_size` values that do not turn, then `rope_size` that do.
    """

    query_rank: int | None  # None: queries come from the hidden state directly
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward layers of experts, and how a token chooses `num_chosen` of them.

    A group is judged by the sum of its `num_group_scores` best scores, and only experts of the
    `num_chosen_groups` best groups can be chosen. The bias, where there is one, counts for the choice alone.
    """

    num: int
    num_chosen: int
    inner_size: int
    shared_size: int = 0  # inner width of the experts that every token goes to, together
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary feed-forward layer
    scoring: str = "softmax"  # or "sigmoid"
    has_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 1
    normalises: bool = True  # weights of the chosen add up to 1, before `scale`
    scale: float = 1.0


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of one decoder-only transformer. `architecture` is the key of models.registry.

    With `latent`, `head_size` is that of a query, and there are as many key-value heads as heads.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # with what a scaling adds
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on each head of q and k, before the rotary embedding
    whole_qk_norm: bool = False  # RMS norm on all heads of q together, and on those of k
    rotary_size: int | None = None  # the first so many values of a head turn; None: all
    score_scale: float | None = None  # of attention; None: head_size ** -0.5
    latent: LatentAttention | None = None
    experts: Experts | None = None
    sliding_window: int | None = None  # a token sees itself and the window-1 before it
    full_layers: tuple[int, ...] = ()  # layers that see everything in spite of it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def turned_size(self) -> int:
        """How many values of a head turn with the position."""
        return self.rotary_size or self.head_size


def require_consistent(description: ModelDescription, where: str) -> ModelDescription:
    """Hands the description back, or raises a `ModelFileError` about fields of `where` that contradict."""
    heads, kv_heads = description.num_heads, description.num_kv_heads
    if heads % kv_heads:
        raise ModelFileError(
            f"{where}: the number of attention heads ({heads}) is not a multiple of the number of "
            f"key-value heads ({kv_heads}).",
            CHECK_CONFIG,
        )
    turned = description.turned_size
    if turned % 2 or turned > description.head_size:
        raise ModelFileError(
            f"{where}: {turned} values of a head of {description.head_size} turn; rotary embeddings need an "
            "even number of them.",
            CHECK_CONFIG,
        )
    _require_consistent_experts(description.experts, where)
    factors = description.rope_scaling.factors
    if description.rope_scaling.kind == "factors" and len(factors) != turned // 2:
        raise ModelFileError(
            f"{where}: {len(factors)} rotary factors for {turned} values of a head that turn.",
            CHECK_CONFIG,
        )
    return description


def _require_consistent_experts(experts: Experts | None, where: str) -> None:
    if experts is None:
        return
    size, rest = divmod(experts.num, experts.num_groups)
    eligible = experts.num_chosen_groups * size
    if rest or experts.num_chosen_groups > experts.num_groups or experts.num_group_scores > size:
        raise ModelFileError(
            f"{where}: {experts.num} experts do not fall into {experts.num_groups} groups of which "
            f"{experts.num_chosen_groups} are chosen.",
            CHECK_CONFIG,
        )
    if experts.num_chosen > eligible:
        raise ModelFileError(
            f"{where}: a token chooses {experts.num_chosen} experts, and {eligible} can be chosen.",
            CHECK_CONFIG,
        )
