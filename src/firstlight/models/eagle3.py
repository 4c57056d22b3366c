"""The EAGLE-3 drafter: one decoder layer that predicts tokens from a target's hidden states.

Index j takes the target's state h_j and the token x_{j+1}, and predicts x_{j+2}; its rotary position is j.
The next draft takes the drafter's own output in place of a state. Invariant: `unroll` (training) and
`advance` (serving) give the same numbers for the same index, whatever stands after it.

Shapes: T indices, C captured states, H hidden, N heads, K key-value heads, D head size, V target vocabulary,
R draft vocabulary, Q indices that are drafted from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from firstlight.facts.description import LatentAttention, RopeScaling
from firstlight.models.eagle3_unroll import UnrollRows, attend_blocks, scores, weigh
from firstlight.models.layers.rotary import rotary_frequencies


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a drafter. `state_layers[c]`: the c-th state is the residual stream after so many
    blocks.

    `norm_before_residual`: the residual is the normed state. `norm_before_fc`: one norm over all states
    before they are joined; `fc_norm`: one for each. `norm_output`: the next draft gets the normed output
    (EAGLE-3.1).
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    state_layers: tuple[int, ...]
    rope_scaling: RopeScaling = RopeScaling()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    latent: LatentAttention | None = None  # sizes of latent attention; then as many kv heads as heads
    score_scale: float | None = None  # of attention; None: head_size ** -0.5


@dataclass(frozen=True)
class Attending:
    """What attention needs: queries [T, N, D], keys and values [T, K, D], and the residual [T, H].

    Of latent attention: queries and keys [.., L + R], values [.., L], of one key-value head.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    residual: torch.Tensor


class RmsNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class _Undrawn(nn.Linear):
    """A layer whose weights come from a file: drawing ten million of them would take a tenth of a second."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Eagle3Drafter(nn.Module):
    """The drafter. `embedding_VH` is the target's, frozen, and no part of the drafter's own weights.

    Parameters have the names of the layer's tensors in a checkpoint; `target_ids_R` maps draft ids to the
    target's.
    """

    target_ids_R: torch.Tensor
    embedding_VH: torch.Tensor
    frequencies: torch.Tensor

    def __init__(
        self,
        config: DrafterConfig,
        embedding_VH: torch.Tensor,
        *,
        draws_weights: bool = True,
    ) -> None:
        super().__init__()
        linear = nn.Linear if draws_weights else _Undrawn
        self.config = c = config
        # A served target gives rows of its own table, which is not held a second time.
        self.look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
        width, eps, joined = c.hidden_size, c.norm_eps, len(c.state_layers) * c.target_hidden_size
        self.fc = linear(joined, width, bias=False)
        self.input_norm = RmsNorm(joined, eps) if c.norm_before_fc else None
        chunk_norms = [RmsNorm(c.target_hidden_size, eps) for _ in c.state_layers] if c.fc_norm else []
        self.fc_norm = nn.ModuleList(chunk_norms)
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self._declare_attention(linear)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.gate_proj = linear(width, c.intermediate_size, bias=False)
        self.up_proj = linear(width, c.intermediate_size, bias=False)
        self.down_proj = linear(c.intermediate_size, width, bias=False)
        self.norm = RmsNorm(width, eps)
        self.lm_head = linear(width, c.draft_vocab_size, bias=False)
        self.register_buffer("target_ids_R", torch.arange(c.draft_vocab_size), persistent=False)
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)
        num_turned = c.head_size if c.latent is None else c.latent.rope_size
        frequencies = rotary_frequencies(num_turned, c.rope_theta, c.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _declare_attention(self, linear: type[nn.Linear]) -> None:
        c, width = self.config, self.config.hidden_size
        self.q_proj = linear(2 * width, c.num_heads * c.head_size, bias=False)
        self.k_proj = linear(2 * width, c.num_kv_heads * c.head_size, bias=False)
        self.v_proj = linear(2 * width, c.num_kv_heads * c.head_size, bias=False)
        self.o_proj = linear(c.num_heads * c.head_size, width, bias=False)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Key-value heads, and the values of a key and of a value."""
        return self.config.num_kv_heads, self.config.head_size, self.config.head_size

    def fuse(self, states_TCH: torch.Tensor) -> torch.Tensor:
        """The target's states of each index joined to one [T, H], the lowest layer first."""
        states = states_TCH.to(self.fc.weight.dtype)
        if len(self.fc_norm):
            states = torch.stack([norm(states[:, c]) for c, norm in enumerate(self.fc_norm)], 1)
        joined = states.flatten(1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding [T, H]."""
        return self.look_up(tokens_T) if self.look_up else self.embedding_VH.index_select(0, tokens_T)

    def attending(
        self,
        hidden_TH: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> Attending:
        """The first half of the layer: `hidden_TH` are fused states, or `feedback` of the drafts before."""
        x, residual = self._entered(hidden_TH, tokens_T)
        return Attending(self._queries(x, positions_T), *self._keys_and_values(x, positions_T), residual)

    def _entered(self, hidden_TH: torch.Tensor, tokens_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the projections take [T, 2H], and the residual [T, H]."""
        embedded = self.embed(tokens_T).to(hidden_TH.dtype)
        normed = self.hidden_norm(hidden_TH)
        x = torch.cat((self.input_layernorm(embedded), normed), -1)
        return x, normed if self.config.norm_before_residual else hidden_TH

    def _queries(self, x: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        heads = self.q_proj(x).view(-1, self.config.num_heads, self.config.head_size)
        return _rotate(heads, self._turn(positions_T))

    def _keys_and_values(
        self,
        x: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, self.config.num_kv_heads, self.config.head_size)
        keys = _rotate(self.k_proj(x).view(shape), self._turn(positions_T))
        return keys, self.v_proj(x).view(shape)

    def _turn(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions_T.float()[:, None] * self.frequencies
        factor = self.config.rope_scaling.turn_factor
        return angles.cos()[:, None] * factor, angles.sin()[:, None] * factor

    def finish(self, attended_TI: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """The second half: what attention gave [T, N * D] becomes the output [T, H], before any norm."""
        x_TH = residual_TH + self.o_proj(attended_TI)
        normed = self.post_attention_layernorm(x_TH)
        return x_TH + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def logits(self, output_TH: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary [T, R]."""
        return self.lm_head(self.norm(output_TH))

    def feedback(self, output_TH: torch.Tensor) -> torch.Tensor:
        """What the next draft takes as its hidden state."""
        return self.norm(output_TH) if self.config.norm_output else output_TH

    def advance(
        self,
        hidden_TH: torch.Tensor,
        tokens_T: torch.Tensor,
        cache: DraftCache,
    ) -> torch.Tensor:
        """The layer's output [T, H] at the next T indices of one sequence, whose keys join the cache."""
        first = cache.length
        positions = torch.arange(first, first + len(tokens_T), device=tokens_T.device)
        new = self.attending(hidden_TH, tokens_T, positions)
        keys, values = cache.extend(new.keys, new.values)
        seen_TS = torch.arange(len(keys), device=tokens_T.device) <= positions[:, None]
        scores_KGTS = scores(new.queries, keys).masked_fill(~seen_TS, float("-inf"))
        return self.finish(weigh(scores_KGTS.softmax(-1), values), new.residual)

    def unroll(self, rows: UnrollRows, num_steps: int) -> Iterator[torch.Tensor]:
        """Training-time test: the outputs [Q, H] of `num_steps` drafts from each index in `rows.queries_Q`.

        Draft i of index j embeds the true token x_{j+1+i}, has the output of draft i-1 as its state, and
        attends to the keys of true states up to j and of its own earlier drafts: what serving does after a
        right guess.
        """
        chosen = rows.queries_Q
        x, residual = self._entered(self.fuse(rows.states_TCH), rows.tokens_T)
        base = self._keys_and_values(x, rows.positions_T)
        # An index that is not drafted from is a key to others, and needs no query of its own.
        positions, residual = rows.positions_T[chosen], residual[chosen]
        queries = self._queries(x[chosen], positions)
        blocks = rows.blocks()
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(num_steps):
            output = self.finish(attend_blocks(queries, base, own, blocks), residual)
            yield output
            if step + 1 < num_steps:
                new = self.attending(self.feedback(output), rows.later_tokens(step + 1), positions + step + 1)
                own.append((new.keys, new.values))
                queries, residual = new.queries, new.residual


class DraftCache:
    """Keys and values of one sequence's indices, so far. `truncate` forgets drafts."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self._keys is None else len(self._keys)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends, and returns all [S, K, D]."""
        self._keys = keys if self._keys is None else torch.cat((self._keys, keys))
        self._values = values if self._values is None else torch.cat((self._values, values))
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:length], self._values[:length]


def _rotate(x_TND: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns the pairs (i, i + D/2): the order of Hugging Face checkpoints."""
    cos, sin = turn
    first, second = x_TND.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x_TND.dtype)
