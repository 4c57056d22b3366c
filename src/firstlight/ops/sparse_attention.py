"""Paged attention without copying a history, from stock PyTorch operators; row-invariant.

A row of scores is a row of a sparse matrix: sampled dense-dense product for q K^T at the slots that the row
may see, softmax, and a weighted embedding bag for p V. Both read K and V where they lie in the paged pool,
and compute every row by itself, in the order of its positions; so a row's bits depend on nothing but its own
sequence.

A row of length n is padded to the next of 64, 128, 256, 512 and then of four steps an octave (640, 768, 896,
1024, 1280, …): rows of one bucket share three operator calls, and
the bucket depends on the row's own length alone. Padded columns point at slot 0 of the null page, which is
zero, with a score of -inf.
Measured against gathering K and V for scaled_dot_product_attention: 2x faster at one row and 128 tokens, 3 to
15x at 32 rows and 512 tokens (docs/decisions.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from firstlight.ops.contract import AttentionShape, StepRows

SMALLEST_BUCKET = 64
COARSE_UP_TO = 512  # beyond it, padding to powers of two would waste more than the calls it saves
# Scores of one operator call: 4 M of them take 48 MB of indices and values.
MAX_SCORES_PER_CALL = 4 * 2**20
# Up to this many scores the layout is kept for all layers, beyond it is made anew in each.
MAX_KEPT_SCORES = 16 * 2**20
BYTES_PER_SCORE = 16  # a column index, a mask value and the score itself


@dataclass(frozen=True)
class Bucket:
    """Rows whose histories are padded to one length: the sparse matrix of their scores, -inf where padded."""

    rows: torch.Tensor | None  # row indices, or None for all rows in order
    mask: torch.Tensor  # CSR [rows * N, slots * K]: 0 and -inf
    scores: torch.Tensor  # the same pattern: overwritten in every layer
    columns: torch.Tensor  # flat
    offsets: torch.Tensor  # first column of each row
    length: int


@dataclass
class SparsePlan:
    """The buckets of a step. Made by `plan`, used by `attend` in every layer."""

    rows: StepRows
    shape: AttentionShape
    lengths_T: np.ndarray[tuple[int], np.dtype[np.int64]]  # tokens that row t sees
    pieces: list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]]  # (row indices, padded length)
    num_scores: int
    kept: dict[int, list[Bucket]] = field(default_factory=dict)  # by number of slots of the pool

    def buckets(self, num_slots: int) -> Iterator[Bucket]:
        """The buckets for a pool of that many slots."""
        if self.num_scores > MAX_KEPT_SCORES:
            yield from (_bucket(self, piece, num_slots) for piece in self.pieces)
            return
        if num_slots not in self.kept:
            self.kept[num_slots] = [_bucket(self, piece, num_slots) for piece in self.pieces]
        yield from self.kept[num_slots]


def plan(
    rows: StepRows,
    shape: AttentionShape,
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
) -> SparsePlan:
    """Lays out the attention of all rows, or of the `chosen` ones (ascending row indices)."""
    lengths_T = rows.positions_T + 1
    if shape.window is not None:
        lengths_T = np.minimum(lengths_T, shape.window)
    indices = np.arange(len(lengths_T)) if chosen is None else chosen
    buckets = _bucket_lengths(lengths_T[indices])
    pieces = []
    num_scores = 0
    for length in np.unique(buckets):
        members = indices[buckets == length]
        num_scores += len(members) * int(length) * shape.num_heads
        step = max(1, MAX_SCORES_PER_CALL // (int(length) * shape.num_heads))
        pieces += [(members[i : i + step], int(length)) for i in range(0, len(members), step)]
    return SparsePlan(rows, shape, lengths_T, pieces, num_scores)


def attend(
    q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: SparsePlan, out_TND: torch.Tensor
) -> None:
    """Writes the attention of the planned rows into `out_TND`; `values` may be float16, or the keys."""
    heads, size = plan.shape.num_heads, plan.shape.head_size
    keys, values = _as_wide(keys, plan), _as_wide(values, plan)
    slots = keys.shape[0]
    flat_keys = keys.view(slots * plan.shape.num_kv_heads, size).t()
    flat_values = values.view(slots * plan.shape.num_kv_heads, -1)
    for bucket in plan.buckets(slots):
        q = q_TND if bucket.rows is None else q_TND[bucket.rows]
        torch.sparse.sampled_addmm(
            bucket.mask, q.reshape(-1, size), flat_keys, beta=1.0, alpha=plan.shape.scale, out=bucket.scores
        )
        weights = torch.softmax(bucket.scores.values().view(-1, bucket.length), -1).view(-1).to(values.dtype)
        # aten's embedding_bag(weight, indices, offsets, scale_grad, mode 0 = sum, sparse, per_sample_weights)
        bags = torch.embedding_bag(flat_values, bucket.columns, bucket.offsets, False, 0, False, weights)[
            0
        ].view(-1, heads, flat_values.shape[1])[..., : plan.shape.out_size]
        if bucket.rows is None:
            out_TND.copy_(bags)
        else:
            out_TND[bucket.rows] = bags.to(out_TND.dtype)


def _as_wide(rows: torch.Tensor, plan: SparsePlan) -> torch.Tensor:
    """A pool of as many rows as a padded history at least: a sparse row takes no more than all columns."""
    longest = max(length for _, length in plan.pieces)
    missing = -(-longest // plan.shape.num_kv_heads) - len(rows)
    return rows if missing <= 0 else F.pad(rows, (0, 0, 0, 0, 0, missing))


def _bucket_lengths(
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    blocks = np.maximum(1, -(-lengths // SMALLEST_BUCKET))
    power = SMALLEST_BUCKET << np.ceil(np.log2(blocks)).astype(np.int64)
    quarter = power // 8  # an octave below `power` has four steps of this width
    finer = -(-lengths // quarter) * quarter
    return np.where(power <= COARSE_UP_TO, power, finer)


def _bucket(
    plan: SparsePlan, piece: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int], num_slots: int
) -> Bucket:
    members, length = piece
    rows, shape = plan.rows, plan.shape
    lengths = plan.lengths_T[members][:, None]
    within = np.arange(length)
    positions = (rows.positions_T[members][:, None] + 1 - lengths) + within
    padded = within >= lengths
    positions[padded] = 0
    places = rows.places(members, positions)
    pages = rows.page_table_SP[rows.sequence_T[members][:, None], places // rows.page_size]
    slots = pages * rows.page_size + places % rows.page_size
    slots[padded] = 0
    group = shape.num_heads // shape.num_kv_heads
    kv_head_of_head = torch.arange(shape.num_heads) // group
    columns = (torch.from_numpy(slots).unsqueeze(1) * shape.num_kv_heads + kv_head_of_head[:, None]).view(-1)
    mask = torch.zeros(padded.shape).masked_fill_(torch.from_numpy(padded), -torch.inf)
    mask = mask.unsqueeze(1).expand(-1, shape.num_heads, -1).reshape(-1)
    starts = torch.arange(0, len(columns) + 1, length)
    extent = (len(members) * shape.num_heads, num_slots * shape.num_kv_heads)
    matrix, scores = (
        torch.sparse_csr_tensor(starts, columns, values, extent, check_invariants=False)
        for values in (mask, torch.empty_like(mask))
    )
    every = len(members) == len(rows.positions_T)
    return Bucket(None if every else torch.from_numpy(members), matrix, scores, columns, starts[:-1], length)


def _hear_beta_notice() -> None:
    # torch says once a process that sparse CSR tensors are in beta. We know, and test their results.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=False)


_hear_beta_notice()
