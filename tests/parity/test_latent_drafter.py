"""A drafter's latent attention against DeepSeek's in transformers, whose input is twice as wide here."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from firstlight.facts.hf.hf_config import describe_hf
from firstlight.models.eagle3 import DraftCache
from support.drafters import random_drafter
from support.transformers_experts import LATENT, YARN

HIDDEN, NUM = 32, 40


def test_attention_equals_deepseek_s() -> None:
    config = DeepseekV3Config(**{**LATENT, "hidden_size": 2 * HIDDEN, "rope_parameters": YARN})
    config._attn_implementation = "eager"
    layer = describe_hf(config.to_dict(), {})
    drafter = random_drafter(
        num_heads=layer.num_heads, num_kv_heads=layer.num_heads, head_size=layer.head_size,
        latent=layer.latent, score_scale=layer.score_scale, rope_scaling=layer.rope_scaling,
        rope_theta=layer.rope_theta, max_position=512,
    ).requires_grad_(False)  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).requires_grad_(False)
    theirs.o_proj = nn.Identity()
    ours = dict(drafter.named_parameters())
    for name, parameter in theirs.named_parameters():
        parameter.copy_(ours[name])
    x = torch.randn(NUM, 2 * HIDDEN)
    positions = torch.arange(NUM)
    turn = DeepseekV3RotaryEmbedding(config)(x[None], positions[None])
    mask = torch.full((NUM, NUM), float("-inf")).triu(1)[None, None]
    expected = drafter.o_proj(theirs(x[None], turn, mask)[0][0])

    queries = drafter._queries(x, positions)
    keys, values = DraftCache().extend(*drafter._keys_and_values(x, positions))
    scores = torch.einsum("tnl,skl->nts", queries, keys) * keys.shape[-1] ** -0.5
    weights = (scores + mask[0]).softmax(-1)
    attended = torch.einsum("nts,skl->tnl", weights, values).flatten(1)
    got = _attention_alone(drafter, attended)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _attention_alone(drafter, attended: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """What attention adds: `finish` with a feed-forward layer that adds nothing."""
    drafter.down_proj.weight.zero_()
    return drafter.finish(attended, torch.zeros(NUM, HIDDEN))
