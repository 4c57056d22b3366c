"""Latent attention as operators of the native library.

Heads are multiplied with as experts are, from rows that lie head by head. Invariant: the bits are those of
`models.layers.latent`, operator by operator.

Shapes: T tokens, N heads, U and R values of a head that stay and that turn, L latent, V values of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.ops.contract import AttentionShape, LatentRows
from firstlight.ops.cpu.experts import NativeExperts
from firstlight.ops.cpu.library import BY_HEAD, EACH, KV_TYPES, LATENT, QUANTIZE, Op, address
from firstlight.ops.cpu.native_backend import attention_op
from firstlight.ops.cpu.recorder_buffers import Buffers
from firstlight.ops.groups import HeadsOp
from firstlight.ops.heads import HeadsByGroup


@dataclass(frozen=True)
class LatentOps:
    """Operators with their names for the black box; `attended` [.., N * V] is what the last one writes."""

    named: list[tuple[str, Op]]
    attended: torch.Tensor


def latent_ops(
    rows: LatentRows,
    norm: tuple[torch.Tensor, float],
    pool: torch.Tensor,
    shape: AttentionShape,
    buffers: Buffers,
) -> LatentOps:
    """One layer's: latents are normed, turned and written to its `pool`, and attended to."""
    sizes, num = rows.sizes, shape.num_heads
    still = buffers.floats("queries by head", num * sizes.nope_size)
    query = buffers.floats("queries over latents", num * shape.head_size)
    latents = buffers.floats("attended latents", num * sizes.latent_size)
    by_head = buffers.floats("attended latents by head", num * sizes.latent_size)
    attended = buffers.floats("attended", num * sizes.value_size)
    attend = attention_op(shape, query.shape[1], pool.dtype)
    for place, tensor in enumerate((query, pool, pool, latents)):
        attend.p[place] = address(tensor)
    move = Op(BY_HEAD, n=(num, sizes.latent_size), p=(address(latents), address(by_head)))
    into_latents = _products(rows.keys, still, query.view(-1, num, shape.head_size), buffers)
    out_of_them = _products(rows.values, by_head, attended.view(-1, num, sizes.value_size), buffers)
    named = [
        ("rotary and KV write", _turn_op(rows, norm, pool, (still, query), num)),
        *(("queries over latents", op) for op in into_latents),
        ("attention", attend),
        *(("values of latents", op) for op in (move, *out_of_them)),
    ]
    return LatentOps(named, attended)


def _turn_op(
    rows: LatentRows,
    norm: tuple[torch.Tensor, float],
    pool: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
) -> Op:
    """What stays of queries goes head by head to the first of `out`, what turns into rows of the second."""
    sizes = rows.sizes
    strides = (rows.queries.stride(0), rows.latents.stride(0))
    widths = (sizes.nope_size, sizes.rope_size, sizes.latent_size)
    places = (rows.queries, rows.latents, norm[0], pool, *out)
    op = Op(
        LATENT,
        n=(num_heads, *widths, KV_TYPES[pool.dtype], *strides),
        p=tuple(address(place) for place in places),
    )
    op.f[0] = norm[1]
    return op


def _products(
    heads: HeadsOp,
    rows: torch.Tensor,
    out_TNO: torch.Tensor,
    buffers: Buffers,
) -> list[Op]:
    assert isinstance(heads, HeadsByGroup), "a tape takes the heads of its own backend"
    grouped = heads.grouped
    assert isinstance(grouped, NativeExperts), "a tape takes the heads of its own backend"
    if not grouped.takes_codes:
        return [grouped.head_op(rows, out_TNO)]
    num, width = grouped.num_experts, grouped.shape[1]
    codes = buffers.codes(f"{width} values by head", width, num)
    quantize = Op(QUANTIZE, EACH, n=(width, *[0] * 6, num), p=(address(rows), codes.address))
    return [quantize, grouped.head_op(codes, out_TNO)]
