"""Latent attention as operators of the native library, but for the attending itself.

Used by `tape`. Heads are multiplied with as experts are, from rows that lie head by head. Invariant: the bits
are those of `models.layers.latent`, operator by operator.

Shapes: T tokens, N heads, U and R values of a head that stay and that turn, L latent, V values of a head.
"""

from __future__ import annotations

import torch

from firstlight.ops.contract import LatentRows
from firstlight.ops.cpu.experts import NativeExperts
from firstlight.ops.cpu.library import BY_HEAD, EACH, KV_TYPES, LATENT, QUANTIZE, Op, address
from firstlight.ops.cpu.tape_buffers import Buffers
from firstlight.ops.groups import HeadsOp
from firstlight.ops.heads import HeadsByGroup


class LatentHeads:
    """The operators of one layer over the buffers of a tape."""

    def __init__(self, rows: LatentRows, num_heads: int) -> None:
        self._rows, self._num = rows, num_heads
        self._keys, self._values = _grouped(rows.keys), _grouped(rows.values)

    @property
    def still_width(self) -> int:
        """N * U."""
        return self._num * self._rows.sizes.nope_size

    @property
    def value_width(self) -> int:
        """N * V."""
        return self._num * self._rows.sizes.value_size

    def turn_op(
        self,
        norm: tuple[torch.Tensor, float],
        pool: torch.Tensor,
        still: torch.Tensor,
        query: torch.Tensor,
    ) -> Op:
        """Writes latents to the pool, what stays of queries head by head, and what turns into `query`."""
        rows, sizes = self._rows, self._rows.sizes
        strides = (rows.queries.stride(0), rows.latents.stride(0))
        widths = (sizes.nope_size, sizes.rope_size, sizes.latent_size)
        places = (rows.queries, rows.latents, norm[0], pool, still, query)
        op = Op(
            LATENT,
            n=(self._num, *widths, KV_TYPES[pool.dtype], *strides),
            p=tuple(address(place) for place in places),
        )
        op.f[0] = norm[1]
        return op

    def key_ops(self, still: torch.Tensor, query: torch.Tensor, buffers: Buffers) -> list[Op]:
        """Queries into the space of latents."""
        entry = self._rows.sizes.latent_size + self._rows.sizes.rope_size
        return self._products(self._keys, still, query.view(-1, self._num, entry), buffers)

    def value_ops(
        self, latents: torch.Tensor, by_head: torch.Tensor, out: torch.Tensor, buffers: Buffers
    ) -> list[Op]:
        """Attended latents to values of heads."""
        sizes = (self._num, self._rows.sizes.latent_size)
        move = Op(BY_HEAD, n=sizes, p=(address(latents), address(by_head)))
        heads = out.view(-1, self._num, self._rows.sizes.value_size)
        return [move, *self._products(self._values, by_head, heads, buffers)]

    def _products(
        self, grouped: NativeExperts, rows: torch.Tensor, out_TNO: torch.Tensor, buffers: Buffers
    ) -> list[Op]:
        if not grouped.takes_codes:
            return [grouped.head_op(rows, out_TNO)]
        width = grouped.shape[1]
        coded = buffers.codes(f"{width} values by head", width, self._num)
        quantize = Op(QUANTIZE, EACH, n=(width, *[0] * 6, self._num), p=(address(rows), coded.address))
        return [quantize, grouped.head_op(coded, out_TNO)]


def _grouped(heads: HeadsOp) -> NativeExperts:
    assert isinstance(heads, HeadsByGroup), "a tape takes the heads of its own backend"
    assert isinstance(heads.grouped, NativeExperts), "a tape takes the heads of its own backend"
    return heads.grouped
