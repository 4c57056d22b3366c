"""Rows of packed sequences for EAGLE-3's training-time test, and the attention that it unrolls with.

Invariant: a query sees its own sequence up to its own index, and its own earlier drafts, and nothing else.

Shapes: T indices of a row, Q of them that are drafted from, S keys, N heads, K key-value heads, G heads of
one of these, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """A packed sequence: its queries, its indices, and which of these each query may not see."""

    queries: slice
    indices: slice
    hidden_QT: torch.Tensor


@dataclass(frozen=True)
class UnrollRows:
    """Indices of one or more packed sequences, and from which of them is drafted, in rising order.

    `tokens_T[j]` is x_{j+1}. `document_T` numbers the sequences, which stand one behind the other.
    """

    states_TCH: torch.Tensor
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    queries_Q: torch.Tensor
    document_T: torch.Tensor

    def later_tokens(self, step: int) -> torch.Tensor:
        """The tokens `step` indices on; behind the last one any token stands, and no loss looks at it."""
        return self.tokens_T[(self.queries_Q + step).clamp(max=len(self.tokens_T) - 1)]

    def blocks(self) -> list[Block]:
        """The sequences that are drafted from: scores over all of a row would mostly be thrown away."""
        lengths = torch.unique_consecutive(self.document_T, return_counts=True)[1]
        ends = lengths.cumsum(0)
        asked = torch.searchsorted(self.queries_Q, ends).tolist()
        found, first, start = [], 0, 0
        for last, end in zip(asked, ends.tolist(), strict=True):
            if last > first:
                own = self.queries_Q[first:last, None]
                hidden = torch.arange(start, end, device=own.device) > own
                found.append(Block(slice(first, last), slice(start, end), hidden))
            first, start = last, end
        return found


def scores(queries_QND: torch.Tensor, keys_SKD: torch.Tensor) -> torch.Tensor:
    """[K, N/K, Q, S]."""
    num, heads, size = queries_QND.shape
    kv_heads = keys_SKD.shape[1]
    # The query heads of a key-value head are rows of one product.
    grouped = (queries_QND * size**-0.5).view(num, kv_heads, -1, size).permute(1, 2, 0, 3)
    return (grouped.reshape(kv_heads, -1, size) @ keys_SKD.permute(1, 2, 0)).view(
        kv_heads, heads // kv_heads, num, -1
    )


def weigh(weights_KGQS: torch.Tensor, values_SKD: torch.Tensor) -> torch.Tensor:
    """[Q, N * D]."""
    kv_heads, group, num, _ = weights_KGQS.shape
    weighed = weights_KGQS.reshape(kv_heads, group * num, -1) @ values_SKD.transpose(0, 1)
    return weighed.view(kv_heads, group, num, -1).permute(2, 0, 1, 3).flatten(1)


def attend_blocks(
    queries_QND: torch.Tensor,
    base: tuple[torch.Tensor, torch.Tensor],
    own: list[tuple[torch.Tensor, torch.Tensor]],
    blocks: list[Block],
) -> torch.Tensor:
    """Attention of each query to its sequence's `base` keys and to those of its `own` drafts [Q, N * D]."""
    attended = []
    for block in blocks:
        queries = queries_QND[block.queries]
        shared = scores(queries, base[0][block.indices]).masked_fill(block.hidden_QT, float("-inf"))
        drafted = [_own_score(queries, keys[block.queries]) for keys, _ in own]
        weights = torch.cat([shared, *drafted], -1).softmax(-1)
        num_shared = shared.shape[-1]
        weighed = weigh(weights[..., :num_shared], base[1][block.indices])
        for place, (_, values) in enumerate(own, num_shared):
            weighed = weighed + _weigh_own(weights[..., place], values[block.queries])
        attended.append(weighed)
    return torch.cat(attended)


def _own_score(queries_QND: torch.Tensor, keys_QKD: torch.Tensor) -> torch.Tensor:
    """Each query with the key of its own index: [K, N/K, Q, 1]."""
    num, heads, size = queries_QND.shape
    kv_heads = keys_QKD.shape[1]
    grouped = queries_QND.view(num, kv_heads, heads // kv_heads, size)
    return (grouped * keys_QKD[:, :, None]).sum(-1).permute(1, 2, 0)[..., None] * size**-0.5


def _weigh_own(weights_KGQ: torch.Tensor, values_QKD: torch.Tensor) -> torch.Tensor:
    """[Q, N * D]."""
    return (weights_KGQ[..., None] * values_QKD.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).flatten(1)
