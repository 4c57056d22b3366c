"""From shards of states to the rows that one backward pass takes: several documents side by side, never
mixed.

Invariant: the same seed, epoch and shards give the same rows in the same order, so that training goes on
where it stopped.

Shapes: T indices of a row, Q indices that are drafted from, C captured states, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from firstlight.drafter.shards import Document, Shard
from firstlight.models.eagle3_unroll import UnrollRows


@dataclass(frozen=True)
class Row:
    """Documents side by side. `document_T` numbers them; `families_D` and the rest by document."""

    states_TCH: torch.Tensor  # bfloat16
    final_TH: torch.Tensor  # bfloat16
    tokens_T: torch.Tensor  # int64
    wanted_T: torch.Tensor  # int64
    supervised_T: torch.Tensor  # bool
    positions_T: torch.Tensor  # int64
    document_T: torch.Tensor  # int64
    families_D: tuple[str, ...]

    def to(self, device: str) -> Row:
        """The same on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "families_D"}
        return replace(self, **moved)

    def unroll_rows(self) -> UnrollRows:
        """What the drafter's training-time test takes; it drafts from every supervised index."""
        queries = self.supervised_T.nonzero().squeeze(1)
        return UnrollRows(self.states_TCH, self.tokens_T, self.positions_T, queries, self.document_T)

    def valid(self, queries_Q: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For draft `step`: whose prediction it makes [Q], and whether that index is supervised [Q]."""
        later = queries_Q + step
        inside = later < len(self.tokens_T)
        later = later.clamp(max=len(self.tokens_T) - 1)
        same = self.document_T[later] == self.document_T[queries_Q]
        return later, inside & same & self.supervised_T[later]


Spans = list[tuple[Document, slice]]


def rows_of(
    shard: Shard, row_tokens: int, wanted: Callable[[Document], bool], rng: random.Random | None = None
) -> Iterator[Row]:
    """The rows of a shard's `wanted` documents, shuffled by `rng`; a document longer than a row is a row."""
    for spans in plan_rows(shard, row_tokens, wanted, rng):
        yield join(shard, spans)


def plan_rows(
    shard: Shard, row_tokens: int, wanted: Callable[[Document], bool], rng: random.Random | None = None
) -> list[Spans]:
    """Which documents make each row of `rows_of`."""
    spans = [(document, span) for document, span in shard.spans() if wanted(document)]
    spans = [(document, span) for document, span in spans if shard.supervised[span].any()]
    if rng is not None:
        rng.shuffle(spans)
    # Longest first into the first row with room, so that rows are full; then in a random order again.
    rows: list[Spans] = []
    room: list[int] = []
    for document, span in sorted(spans, key=lambda item: -item[0].num_indices):
        place = next((i for i, left in enumerate(room) if left >= document.num_indices), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append((document, span))
        room[place] -= document.num_indices
    if rng is not None:
        rng.shuffle(rows)
    return rows


def join(shard: Shard, parts: Spans) -> Row:
    """A row of documents side by side."""

    def gather(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[span] for _, span in parts])

    lengths = torch.tensor([document.num_indices for document, _ in parts])
    return Row(
        states_TCH=gather(shard.states),
        final_TH=gather(shard.final),
        tokens_T=gather(shard.tokens).long(),
        wanted_T=gather(shard.wanted).long(),
        supervised_T=gather(shard.supervised),
        positions_T=torch.cat([torch.arange(int(length)) for length in lengths]),
        document_T=torch.repeat_interleave(torch.arange(len(parts)), lengths),
        families_D=tuple(document.family for document, _ in parts),
    )
