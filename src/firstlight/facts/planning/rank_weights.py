"""What each rank keeps and reads of a model's weights, and what usual ways of loading make of it.

Pure arithmetic over an `Outline` and `Ranks`, for planning. Invariant: bytes that a rank keeps are those of
`sharding.share_of`, in the layout of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from firstlight.facts.planning.outline import Outline
from firstlight.facts.planning.sharding import EMBEDDING, EXPERTS, KINDS, Ranks, Share, kind_of, share_of
from firstlight.facts.planning.tensor_groups import TensorGroup

PAGE_BYTES = 4096
FAULT_AROUND_BYTES = 65536  # that Linux maps at one fault, where the page cache has them
# Seconds of one core, as measured on a busy core: a view of a tensor in Python; the search of a name
# among those of all experts, one after the other; transposing a matrix of 7.3 MB.
VIEW_S = 14e-6
NAME_SEARCH_S = (60e-6, 170e-6)
TRANSPOSE_BYTES_PER_S = 7.34e6 / 3.75e-3


class KindWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one kind: in the files, and on the rank that keeps most."""

    kind: str
    num_tensors: int
    total_bytes: int
    rank_bytes: int
    rank_tensors: int
    rank_pieces: int  # contiguous byte ranges that the rank keeps
    smallest_piece_bytes: int  # of those that are part of a tensor; 0: whole tensors only


class LoaderCost(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a way of loading brings into the host's memory, for all ranks together."""

    name: str
    nbytes: int
    amplification: float  # of all weights
    experts_amplification: float | None
    read_s: float  # at the storage's rate, if nothing stays in the page cache


class LoadWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work that some loaders do on one core of each rank before or beside all reading."""

    views_s: float
    name_search_s: tuple[float, float]
    transposes_s: float
    minor_faults: int
    minor_faults_around: int


@dataclass(frozen=True)
class _Placed:
    group: TensorGroup
    kind: str
    shares: tuple[Share, ...]  # by rank


_Way = Callable[[_Placed], int]


class RankWeights:
    """See the module. Computed once for a deployment."""

    def __init__(self, outline: Outline, ranks: Ranks) -> None:
        self.outline, self.ranks = outline, ranks
        self._placed = [
            _Placed(
                group,
                kind_of(group.name),
                tuple(share_of(group, outline.description, ranks, rank) for rank in range(ranks.num)),
            )
            for group in outline.groups
        ]

    def rank_bytes(self, rank: int, kind: str | None = None) -> int:
        """Bytes that a rank keeps, of one kind or of all."""
        return sum(p.shares[rank].nbytes for p in self._placed if kind is None or p.kind == kind)

    def total_bytes(self, kind: str) -> int:
        """Bytes of a kind in the files."""
        return sum(p.group.total_bytes for p in self._placed if p.kind == kind)

    @property
    def kinds(self) -> list[str]:
        """The kinds that the model has."""
        return [kind for kind in KINDS if any(p.kind == kind for p in self._placed)]

    @property
    def tied_head_bytes(self) -> int:
        """A rank's share of an embedding that is the head too: beside the whole embedding it is a copy."""
        if not self.outline.description.tie_embeddings or self.ranks.num == 1 or self.ranks.splits_embedding:
            return 0
        return -(-self.rank_bytes(0, EMBEDDING) // self.ranks.num)

    @property
    def fullest_rank(self) -> int:
        """The rank that keeps most; the first of several."""
        return max(range(self.ranks.num), key=self.rank_bytes)

    @property
    def least_bytes(self) -> int:
        """What the rank keeps that keeps least."""
        return min(self.rank_bytes(rank) for rank in range(self.ranks.num))

    def by_kind(self) -> list[KindWeights]:
        """A line for each kind that the model has, for the fullest rank."""
        rank = self.fullest_rank
        return [self._of_kind(kind, rank) for kind in self.kinds]

    def loaders(self, storage_bytes_per_s: float) -> list[LoaderCost]:
        """From the worst to the best possible."""
        ways = {
            "every rank reads everything": _whole_on_every_rank,
            "slices of a memory map": _pages_of_slices,
            "whole rows of what a rank keeps (firstlight)": _own_rows,
        }
        costs = [self._cost(name, way, storage_bytes_per_s) for name, way in ways.items()]
        if self.outline.description.experts is not None and not self.ranks.expert_parallel:
            parallel = RankWeights(self.outline, replace(self.ranks, expert_parallel=True))
            costs.append(parallel._cost("the same, with --expert-parallel", _own_rows, storage_bytes_per_s))
        costs.append(self._cost("each byte once per host", _once, storage_bytes_per_s))
        return costs

    def work(self) -> LoadWork:
        """Costs that do not depend on storage, of a loader that goes tensor by tensor."""
        num = self.outline.num_tensors
        matrices = sum(
            p.group.total_bytes for p in self._placed if p.kind == EXPERTS and "packed" in p.group.name
        )
        return LoadWork(
            views_s=num * VIEW_S,
            name_search_s=(num * NAME_SEARCH_S[0], num * NAME_SEARCH_S[1]),
            transposes_s=matrices / TRANSPOSE_BYTES_PER_S,
            minor_faults=self.outline.total_bytes // PAGE_BYTES,
            minor_faults_around=self.outline.total_bytes // FAULT_AROUND_BYTES,
        )

    def _of_kind(self, kind: str, rank: int) -> KindWeights:
        mine = [placed for placed in self._placed if placed.kind == kind]
        shares = [placed.shares[rank] for placed in mine]
        parts = [
            share.piece_bytes
            for placed, share in zip(mine, shares, strict=True)
            if share.num_pieces * share.piece_bytes < placed.group.nbytes
        ]
        return KindWeights(
            kind=kind,
            num_tensors=sum(placed.group.num for placed in mine),
            total_bytes=sum(placed.group.total_bytes for placed in mine),
            rank_bytes=sum(share.nbytes for share in shares),
            rank_tensors=sum(share.num_tensors for share in shares),
            rank_pieces=sum(share.num_tensors * share.num_pieces for share in shares),
            smallest_piece_bytes=min(parts, default=0),
        )

    def _cost(self, name: str, way: _Way, storage_bytes_per_s: float) -> LoaderCost:
        total = self.outline.total_bytes
        nbytes = sum(way(placed) for placed in self._placed)
        experts = [placed for placed in self._placed if placed.kind == EXPERTS]
        experts_bytes = sum(placed.group.total_bytes for placed in experts)
        return LoaderCost(
            name=name,
            nbytes=nbytes,
            amplification=nbytes / total,
            experts_amplification=sum(way(p) for p in experts) / experts_bytes if experts else None,
            read_s=nbytes / storage_bytes_per_s,
        )


def _whole_on_every_rank(placed: _Placed) -> int:
    return len(placed.shares) * placed.group.total_bytes


def _once(placed: _Placed) -> int:
    return placed.group.total_bytes


def _own_rows(placed: _Placed) -> int:
    """Each rank reads whole rows, and keeps its columns of them."""
    return sum(
        share.num_tensors * (share.piece_bytes if share.num_pieces == 1 else placed.group.nbytes)
        for share in placed.shares
    )


def _pages_of_slices(placed: _Placed) -> int:
    """Each rank brings in the pages that hold its slices; of narrow rows these are all pages."""
    return sum(
        share.num_tensors * _touched_bytes(placed.group, share, rank)
        for rank, share in enumerate(placed.shares)
    )


def _touched_bytes(group: TensorGroup, share: Share, rank: int) -> int:
    if share.num_pieces == 1:
        return share.piece_bytes
    row_bytes = group.nbytes // group.shape[0]
    if row_bytes <= PAGE_BYTES:
        return group.nbytes
    first = min(rank * share.piece_bytes, row_bytes - share.piece_bytes)
    last = first + share.piece_bytes - 1
    pages = last // PAGE_BYTES - first // PAGE_BYTES + 1
    return min(row_bytes, pages * PAGE_BYTES) * group.shape[0]
