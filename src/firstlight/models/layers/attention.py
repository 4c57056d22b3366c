"""Grouped-query attention of one layer over the paged KV pool.

Heads are shared out by whole KV groups, as evenly as they go: 3 KV heads on two ranks are 2 and 1.

Shapes: T tokens, H hidden, N query heads and K KV heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from firstlight.facts.description import LatentAttention, ModelDescription
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.batch import ForwardBatch
from firstlight.models.declare import Declaration
from firstlight.models.layers.linear import Linear, Part, Vector
from firstlight.ops.contract import AttentionShape, Tape
from firstlight.ops.kv_rows import pack
from firstlight.ops.step_clock import Kind


def attention_shape(description: ModelDescription, rank: int, size: int) -> AttentionShape:
    """The heads of one rank, as the pool holds them."""
    if description.latent is not None:
        return latent_shape(
            description.latent, description, split_evenly(description.num_heads, 1, rank, size)
        )
    group = description.num_heads // description.num_kv_heads
    start, stop = split_evenly(description.num_kv_heads, 1, rank, size)
    num_kv_heads = stop - start
    shape = AttentionShape(
        num_kv_heads * group, num_kv_heads, description.head_size, description.sliding_window
    )
    return replace(shape, full=replace(shape, window=None)) if description.full_layers else shape


def latent_shape(
    sizes: LatentAttention, description: ModelDescription, heads: tuple[int, int]
) -> AttentionShape:
    """One row of the pool for all of a rank's heads: the latent, and the rotary key behind it."""
    num_heads, scale = heads[1] - heads[0], description.score_scale
    size = sizes.latent_size + sizes.rope_size
    plain = AttentionShape(num_heads, num_heads, description.head_size, None, scale, sizes.value_size)
    return AttentionShape(num_heads, 1, size, None, scale, sizes.latent_size, plain)


class Attention:
    """Project, rotate, write KV, attend, project back and sum over the ranks."""

    def __init__(self, declare: Declaration, description: ModelDescription, prefix: str, layer: int) -> None:
        self._ops, self._group, self._layer = declare.ops, declare.group, layer
        self._name = f"layers.{layer}.attention"
        self._has_window = layer not in description.full_layers
        self._eps = description.norm_eps
        size = self._size = description.head_size
        self._num_turned = description.turned_size
        pairs = (size, self._num_turned)
        shape = attention_shape(description, declare.group.rank, declare.group.size)
        self._num_heads, self._num_kv_heads = shape.num_heads, shape.num_kv_heads
        group = description.num_heads // description.num_kv_heads
        start, stop = split_evenly(description.num_kv_heads, 1, declare.group.rank, declare.group.size)
        hidden = description.hidden_size

        def rows(name: str, heads: int, bounds: tuple[int, int], *, bias: bool = False) -> Wanted:
            whole = (heads * size,) if bias else (heads * size, hidden)
            full_name = f"{prefix}.{name}_proj.{'bias' if bias else 'weight'}"
            return Wanted.row_slice(full_name, whole, bounds[0] * size, bounds[1] * size)

        def parts(*, bias: bool) -> list[Part]:
            queries = rows("q", description.num_heads, (start * group, stop * group), bias=bias)
            keys = rows("k", description.num_kv_heads, (start, stop), bias=bias)
            values = rows("v", description.num_kv_heads, (start, stop), bias=bias)
            return [Part(queries, pairs), Part(keys, pairs), Part(values)]

        self._qkv = Linear(declare, parts(bias=False), parts(bias=True) if description.attention_bias else ())
        columns = (start * group * size, stop * group * size)
        whole = (hidden, description.num_heads * size)
        self._out = Linear(declare, [Part(Wanted.column_slice(f"{prefix}.o_proj.weight", whole, *columns))])
        self._out_bias = Vector(declare, f"{prefix}.o_proj.bias", hidden) if description.output_bias else None
        self._q_norm = (
            Vector(declare, f"{prefix}.q_norm.weight", size, pairs) if description.qk_norm else None
        )
        self._k_norm = (
            Vector(declare, f"{prefix}.k_norm.weight", size, pairs) if description.qk_norm else None
        )
        self._whole_norm: WholeNorm | None = None
        if description.whole_qk_norm:
            numbers = (description.num_heads, description.num_kv_heads)
            bounds = ((start * group, stop * group), (start, stop))
            self._whole_norm = WholeNorm(declare, prefix, numbers, bounds, pairs)

    def __call__(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        attended = self._group.clock.run(Kind.ATTENTION, self._attend, self._qkv(x_TH), batch)
        out = self._group.all_reduce(self._name, self._out(attended.flatten(1)))
        return out if self._out_bias is None else out + self._out_bias.values

    def _attend(self, qkv_TO: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        num_turned = self._num_heads + self._num_kv_heads
        qkv = qkv_TO.float().unflatten(-1, (-1, self._size))
        turned = qkv[:, :num_turned]
        if self._q_norm is not None and self._k_norm is not None:
            # A weight for each head, so that q and k are normalised in one call.
            q_norm = self._q_norm.values.expand(self._num_heads, -1)
            k_norm = self._k_norm.values.expand(self._num_kv_heads, -1)
            turned = self._ops.rms_norm(turned, torch.cat((q_norm, k_norm)), self._eps)
        if self._whole_norm is not None:
            turned = self._whole_norm(turned, self._eps)
        turned = self._turn(turned, batch.turn_TD)
        keys, values = batch.keys[self._layer], batch.values[self._layer]
        keys.index_copy_(0, batch.write_slots_T, pack(turned[:, self._num_heads :], keys.dtype))
        values.index_copy_(0, batch.write_slots_T, pack(qkv[:, num_turned:], values.dtype))
        plan = batch.attention if self._has_window else batch.full_attention
        return self._ops.attend(turned[:, : self._num_heads], keys, values, plan)

    def _turn(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        if self._num_turned == self._size:
            return self._ops.rotate(x_TND, turn_TD)
        turned = self._ops.rotate(x_TND[..., : self._num_turned], turn_TD)
        return torch.cat((turned, x_TND[..., self._num_turned :]), -1)

    def record(self, tape: Tape, x: Any) -> None:
        """Takes down `__call__` with the addition to the residual stream."""
        if self._whole_norm is not None or self._num_turned < self._size:
            tape.add_called(self, x)
            return
        qkv = tape.product(self._qkv.operators, x, self._qkv.bias, "qkv")
        norms = tuple(norm.values if norm is not None else None for norm in (self._q_norm, self._k_norm))
        attended = tape.attend(qkv, self._layer, norms, self._eps, windowed=self._has_window)
        bias = self._out_bias.values if self._out_bias is not None else None
        reduce = partial(self._group.all_reduce, self._name) if self._group.size > 1 else None
        tape.add_product(self._out.operators, attended, bias, reduce)


# RMS norm over all heads of the queries together, and over all of the keys (MiniMax-M2). Where heads are
# shared out, the ranks add up their squares first. A rank gets for its heads what a single rank would get,
# up to the rounding of that sum. Shapes: T tokens, N query heads and K KV heads of this rank, D head size.


class WholeNorm:
    """`bounds`: this rank's heads of the queries, and of the keys; `interleave` as in `linear.Part`."""

    def __init__(
        self,
        declare: Declaration,
        prefix: str,
        num_heads: tuple[int, int],
        bounds: tuple[tuple[int, int], tuple[int, int]],
        interleave: tuple[int, int],
    ) -> None:
        self._ops, self._group, self._name = declare.ops, declare.group, f"{prefix}.norm"
        size = interleave[0]
        self._bounds = [(first * size, last * size) for first, last in bounds]
        self._widths = [num * size for num in num_heads]
        self._weights = [
            Vector(declare, f"{prefix}.{name}_norm.weight", width, interleave)
            for name, width in zip("qk", self._widths, strict=True)
        ]

    def __call__(self, turned_TND: torch.Tensor, eps: float) -> torch.Tensor:
        """Queries and then keys [T, N + K, D], normalised."""
        flat = turned_TND.flatten(1)
        parts = flat.split([last - first for first, last in self._bounds], -1)
        weights = [w.values[slice(*bounds)] for w, bounds in zip(self._weights, self._bounds, strict=True)]
        if self._group.size == 1:
            normed = [self._ops.rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
        else:
            squares = torch.stack([part.square().sum(-1) for part in parts], -1)
            means = self._group.all_reduce(self._name, squares) / torch.tensor(
                self._widths, device=flat.device
            )
            scales = torch.rsqrt(means + eps).split(1, -1)
            normed = [x * scale * w for x, scale, w in zip(parts, scales, weights, strict=True)]
        return torch.cat(normed, -1).view_as(turned_TND)
