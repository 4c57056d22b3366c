"""Attention of sequences with many rows, as batches for scaled_dot_product_attention.

A long chunk is cut into blocks of rows, each of which looks only at the history up to its own end: causal
attention without computing the masked half. Blocks whose row counts and lengths round up to the same powers
of two are padded to one batch, so that the number of operator calls grows with the logarithm of the sizes and
not with the number of sequences. The history is gathered from the pool once a block and layer: a cost of one
read for all its rows. Not row-invariant: the blocking inside the operator follows the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from firstlight.ops.contract import AttentionShape, StepRows

BLOCK_ROWS = 128


@dataclass(frozen=True)
class Block:
    """`count` rows of a sequence from position `start` on; `row` is the first one's index in the step."""

    sequence: int
    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Batch:
    """B sequences, C rows and L positions each after padding."""

    shape: AttentionShape
    rows_BC: torch.Tensor  # row indices; padded ones repeat a real row
    valid_BC: torch.Tensor | None  # bool; None: no row is padded
    slots_BL: torch.Tensor  # pool slots of the history
    mask_B1CL: torch.Tensor  # bool: row c may see position l


def plan(rows: StepRows, shape: AttentionShape, chosen: list[int], device: torch.device) -> list[Batch]:
    """Batches for the `chosen` sequences (indices into `rows.counts`)."""
    groups: dict[tuple[int, int], list[Block]] = {}
    for block in _blocks(rows, chosen):
        key = (power_of_two(block.count), power_of_two(block.start + block.count))
        groups.setdefault(key, []).append(block)
    return [_batch(rows, shape, members, device) for members in groups.values()]


def attend(
    q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batches: list[Batch], out_TND: torch.Tensor
) -> None:
    """Writes the attention of every batch's rows into `out_TND`; `values` may be the keys, and too wide."""
    num_kv_heads, out_size = keys.shape[1], out_TND.shape[-1]
    for batch in batches:
        num_batch, count = batch.rows_BC.shape
        heads, size = q_TND.shape[1:]
        group = heads // num_kv_heads
        # Query heads of one KV head become further rows: the operator then reads each key once for all of
        # them.
        q = q_TND[batch.rows_BC].view(num_batch, count, num_kv_heads, group, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(num_batch, num_kv_heads, group * count, size)
        k = keys[batch.slots_BL].transpose(1, 2)
        v = values[batch.slots_BL][..., :out_size].transpose(1, 2).to(k.dtype)
        mask = batch.mask_B1CL.repeat(1, 1, group, 1)
        q = q.to(k.dtype)
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=batch.shape.scale)
        result = result.view(num_batch, num_kv_heads, group, count, out_size).permute(0, 3, 1, 2, 4)
        result = result.reshape(num_batch, count, heads, out_size).to(out_TND.dtype)
        if batch.valid_BC is None:
            out_TND[batch.rows_BC] = result
        else:
            out_TND[batch.rows_BC[batch.valid_BC]] = result[batch.valid_BC]


def _blocks(rows: StepRows, chosen: list[int]) -> list[Block]:
    first_row = np.concatenate(([0], np.cumsum(rows.counts)))
    blocks = []
    for sequence in chosen:
        start, count, row = rows.starts[sequence], rows.counts[sequence], int(first_row[sequence])
        for done in range(0, count, BLOCK_ROWS):
            blocks.append(Block(sequence, row + done, start + done, min(BLOCK_ROWS, count - done)))
    return blocks


def _batch(rows: StepRows, shape: AttentionShape, blocks: Sequence[Block], device: torch.device) -> Batch:
    starts = np.array([block.start for block in blocks])[:, None]
    counts = np.array([block.count for block in blocks])[:, None]
    firsts = np.array([block.row for block in blocks])[:, None]
    sequences = np.array([block.sequence for block in blocks])[:, None]
    within = np.arange(counts.max())[None, :]
    rows_BC = firsts + np.minimum(within, counts - 1)
    positions_BC = (starts + np.minimum(within, counts - 1))[:, None, :, None]
    # The oldest position that any row of the batch sees: before it, a sliding window needs no history.
    oldest = np.zeros_like(starts) if shape.window is None else np.maximum(0, starts + 1 - shape.window)
    ends = starts + counts
    history = oldest + np.arange((ends - oldest).max())[None, :]
    clipped = np.minimum(history, ends - 1)
    pages = rows.page_table_SP[sequences, clipped // rows.page_size]
    slots_BL = pages * rows.page_size + clipped % rows.page_size
    seen = history[:, None, None, :]
    mask = seen <= positions_BC
    if shape.window is not None:
        mask &= seen > positions_BC - shape.window
    for row, block in enumerate(blocks):
        if rows.branches_TW is not None and rows.branches_TW[block.row, 0] >= 0:
            mask[row, 0, : block.count] = _tree_mask(rows, shape, block, history[row])
    return Batch(
        shape,
        torch.from_numpy(rows_BC).to(device),
        None if (counts == counts[0]).all() else torch.from_numpy(within < counts).to(device),
        torch.from_numpy(slots_BL).to(device),
        torch.from_numpy(mask).to(device),
    )


def _tree_mask(
    rows: StepRows,
    shape: AttentionShape,
    block: Block,
    places_L: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Which of these places the nodes of a tree see: what comes before it, and their own branches [C, L]."""
    assert rows.branches_TW is not None, "a tree has branches"
    chosen = slice(block.row, block.row + block.count)
    positions, branches = rows.positions_T[chosen, None], rows.branches_TW[chosen]
    oldest = positions - (shape.window or rows.positions_T.max() + 1)
    mask: np.ndarray[Any, Any] = (places_L < block.start) & (places_L > oldest)
    for depth in range(branches.shape[1]):
        is_seen = (branches[:, depth, None] >= 0) & (block.start + depth > oldest)
        mask |= is_seen & (places_L == branches[:, depth, None])
    return mask


def power_of_two(number: int) -> int:
    """The next power of two: the size a dimension is padded to."""
    return 1 << max(0, number - 1).bit_length()
