"""Kimi-K2.5 in small: its architecture in its own proportions, as large as is asked for.

Invariant: what is switched on in Kimi-K2.5 is switched on here (queries of low rank, latents, a dense layer
first, sigmoid routing with a bias, a shared expert, yarn).

Its own sizes, to which the proportions are: hidden 7168, queries' rank 1536, latent 512, dense 18432, experts
2048 wide.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from msgspec.structs import replace

from firstlight.base.errors import UsageError
from firstlight.facts.description import Experts, LatentAttention, ModelDescription, RopeScaling
from firstlight.models.random_model import Packing, num_bytes

WRAPPER = "kimi_k25"
UNIT = 32  # every width is a multiple of it: whole groups of the quantised formats
SMALLEST_HIDDEN = 64
MOST_WIDTHS = 10_000  # that are tried
MAX_POSITION = 4096
YARN = RopeScaling(kind="yarn", factor=64.0, original_max_position=MAX_POSITION // 64)


def kimi_of_hidden(
    hidden_size: int,
    *,
    vocab_size: int,
    num_layers: int = 4,
    num_experts: int = 16,
    end_ids: tuple[int, ...] = (),
) -> ModelDescription:
    """Layer 0 is dense; each token goes to an eighth of the experts, 2 at least and 8 at most."""
    width = max(2 * UNIT, _part(hidden_size, 2, 7))  # two ranks can share it
    sizes = LatentAttention(
        query_rank=_part(hidden_size, 3, 14),
        latent_size=_part(hidden_size, 1, 14),
        nope_size=32 if hidden_size < 1024 else 128,
        rope_size=16 if hidden_size < 1024 else 64,
        value_size=32 if hidden_size < 1024 else 128,
    )
    heads = max(2, hidden_size // (64 if hidden_size < 1024 else 112))
    size = sizes.nope_size + sizes.rope_size
    experts = Experts(
        num=num_experts,
        num_chosen=min(8, max(2, num_experts // 8)),
        inner_size=width,
        shared_size=width,
        dense_layers=(0,),
        scoring="sigmoid",
        has_bias=True,
        scale=2.827,
    )
    return ModelDescription(
        architecture="kimi_k2",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=size,
        rotary_size=sizes.rope_size,
        score_scale=size**-0.5 * (0.1 * math.log(YARN.factor) + 1.0) ** 2,
        latent=sizes,
        experts=experts,
        intermediate_size=_part(hidden_size, 18, 7),
        vocab_size=vocab_size,
        max_position=MAX_POSITION,
        norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling=YARN,
        eos_token_ids=end_ids,
    )


def kimi_of_size(most_bytes: int, packing: Packing, smallest: ModelDescription) -> ModelDescription:
    """As wide as fits into `most_bytes` of weights, with the layers and experts of `smallest`.

    Raises `UsageError` where even that is too large.
    """
    assert smallest.experts is not None, "a Kimi has experts"
    num_experts = smallest.experts.num

    def of_width(step: int) -> ModelDescription:
        wider = kimi_of_hidden(
            _width(smallest.hidden_size, step),
            vocab_size=smallest.vocab_size,
            num_layers=smallest.num_layers,
            num_experts=num_experts,
            end_ids=smallest.eos_token_ids,
        )
        return replace(wider, bos_token_id=smallest.bos_token_id)

    num_fitting = bisect_right(
        range(MOST_WIDTHS), most_bytes, key=lambda step: num_bytes(of_width(step), packing)
    )
    if not num_fitting:
        raise UsageError(
            f"A Kimi of {smallest.num_layers} layers and {num_experts} experts has "
            f"{num_bytes(of_width(0), packing)} bytes at least.",
            "Give a larger --size, or fewer --layers or --experts.",
        )
    return of_width(num_fitting - 1)


def _width(smallest: int, step: int) -> int:
    """Hidden sizes from the smallest one on, in steps that grow at 1024."""
    num_small = max(0, -(-(1024 - smallest) // SMALLEST_HIDDEN))
    return smallest + SMALLEST_HIDDEN * (min(step, num_small) + 4 * max(0, step - num_small))


def _part(hidden_size: int, numerator: int, denominator: int) -> int:
    """A share of the hidden size in whole units, one at least."""
    return max(1, round(hidden_size * numerator / denominator / UNIT)) * UNIT
