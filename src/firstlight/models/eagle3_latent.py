"""The EAGLE-3 drafter whose layer has latent attention, as DeepSeek's and Kimi's published ones have.

Invariant: everything but attention is that of `eagle3.Eagle3Drafter`. Attention is in the absorbed form: a
key is the latent with the rotary key behind it, a value is the latent, of one key-value head.

Shapes: T indices, N heads, L latent, V values of a head; R values of a query that turn, U that do not.
"""

from __future__ import annotations

import torch
from torch import nn

from firstlight.facts.description import LatentAttention
from firstlight.models.eagle3 import DrafterConfig, Eagle3Drafter, RmsNorm
from firstlight.models.layers.latent import LATENT_EPS


class LatentEagle3Drafter(Eagle3Drafter):
    """See the module. `config.latent` is there."""

    @property
    def sizes(self) -> LatentAttention:
        """Of the attention."""
        assert self.config.latent is not None, "a drafter without latent attention"
        return self.config.latent

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return 1, self.sizes.latent_size + self.sizes.rope_size, self.sizes.latent_size

    def _declare_attention(self, linear: type[nn.Linear]) -> None:
        c, sizes, width = self.config, self.sizes, 2 * self.config.hidden_size
        num_queries = c.num_heads * c.head_size
        if sizes.query_rank is None:
            self.q_proj = linear(width, num_queries, bias=False)
        else:
            self.q_a_proj = linear(width, sizes.query_rank, bias=False)
            self.q_a_layernorm = RmsNorm(sizes.query_rank, LATENT_EPS)
            self.q_b_proj = linear(sizes.query_rank, num_queries, bias=False)
        self.kv_a_proj_with_mqa = linear(width, sizes.latent_size + sizes.rope_size, bias=False)
        self.kv_a_layernorm = RmsNorm(sizes.latent_size, LATENT_EPS)
        each = sizes.nope_size + sizes.value_size
        self.kv_b_proj = linear(sizes.latent_size, c.num_heads * each, bias=False)
        self.o_proj = linear(c.num_heads * sizes.value_size, c.hidden_size, bias=False)

    def _expanding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys [N, U, L] and values [N, V, L] of latents."""
        sizes = self.sizes
        whole = self.kv_b_proj.weight.unflatten(0, (self.config.num_heads, -1))
        keys, values = whole.split((sizes.nope_size, sizes.value_size), 1)
        return keys, values

    def _queries(self, x: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        c, sizes = self.config, self.sizes
        if sizes.query_rank is None:
            queries = self.q_proj(x)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        heads = queries.view(-1, c.num_heads, c.head_size)
        still, turning = heads.split((sizes.nope_size, sizes.rope_size), -1)
        absorbed = torch.einsum("tnu,nul->tnl", still, self._expanding()[0])
        turned = _turn_pairs(turning, self._turn(positions_T))
        # Whoever weighs keys divides by the root of what a key has here.
        scale = c.head_size**-0.5 if c.score_scale is None else c.score_scale
        return torch.cat((absorbed, turned), -1) * (scale * self.kv_shape[1] ** 0.5)

    def _keys_and_values(
        self,
        x: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        latent, rope = self.kv_a_proj_with_mqa(x)[:, None].split((sizes.latent_size, sizes.rope_size), -1)
        latent = self.kv_a_layernorm(latent)
        keys = torch.cat((latent, _turn_pairs(rope, self._turn(positions_T))), -1)
        return keys, keys[..., : sizes.latent_size]

    def finish(self, attended_TI: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """See `Eagle3Drafter.finish`; of each head a latent is attended to [T, N * L]."""
        latents = attended_TI.unflatten(-1, (self.config.num_heads, -1))
        values = torch.einsum("tnl,nvl->tnv", latents, self._expanding()[1])
        return super().finish(values.flatten(1), residual_TH)


def make_drafter(
    config: DrafterConfig,
    embedding_VH: torch.Tensor,
    *,
    draws_weights: bool = True,
) -> Eagle3Drafter:
    """The drafter that a configuration describes."""
    kind = Eagle3Drafter if config.latent is None else LatentEagle3Drafter
    return kind(config, embedding_VH, draws_weights=draws_weights)


def _turn_pairs(x_TNR: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns the pairs (2i, 2i+1): the order of DeepSeek's checkpoints."""
    cos, sin = turn
    even, odd = x_TNR.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return turned.to(x_TNR.dtype)
