"""Multi-head latent attention (MLA) of one layer: keys and values of all heads come from one latent a token.

The pool holds the latent (normed) and the rotary key (turned) of each token, as one row for all heads, on
every rank. In the absorbed form a head's query is brought into the space of latents, and what it attends to
comes back from there: q·(W_K c) = (W_K^T q)·c. So nothing is expanded, however long the history is, and a
row's bits do not depend on the rest of the step. In the plain form keys and values of each head are made of
the latents, which is less work where whole prompts are computed; it runs on operators that promise no bits.

Heads are shared out over the ranks. Shapes: T tokens, H hidden, N heads of this rank, L latent, R rotary
values of a head, U values of a head that do not turn, D = U + R, V values of a head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.facts.description import ModelDescription
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.batch import ForwardBatch, OwnRows
from firstlight.models.declare import Declaration
from firstlight.models.layers.grouped import require_order
from firstlight.models.layers.linear import Linear, Part, StoredMatrix, Vector
from firstlight.ops.contract import HEADS, LatentRows, MatrixKind, Tape
from firstlight.ops.groups import HeadsOp
from firstlight.ops.kv_rows import pack
from firstlight.ops.step_clock import Kind
from firstlight.quant.registry import UNQUANTIZED, dequantize
from firstlight.quant.weight import Weight

# Of the norms on the two latents: what the publishers' own code has, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


class LatentAttention:
    """See the module."""

    def __init__(self, declare: Declaration, description: ModelDescription, prefix: str, layer: int) -> None:
        sizes = description.latent
        assert sizes is not None, "latent attention in a model without it"
        self._ops, self._group, self._layer = declare.ops, declare.group, layer
        self._name = f"layers.{layer}.attention"
        self._sizes, self._head_size = sizes, description.head_size
        heads, hidden = description.num_heads, description.hidden_size
        share = split_evenly(heads, 1, declare.group.rank, declare.group.size)
        self._num_heads = share[1] - share[0]

        def of_heads(name: str, size: int, inputs: int) -> Part:
            """This rank's heads of a matrix with `size` outputs for each."""
            bounds = (share[0] * size, share[1] * size)
            return Part(Wanted.row_slice(f"{prefix}.{name}.weight", (heads * size, inputs), *bounds))

        rank = sizes.query_rank
        shape = (sizes.latent_size + sizes.rope_size, hidden)
        latents = Part(Wanted.whole(f"{prefix}.kv_a_proj_with_mqa.weight", shape))
        if rank is None:
            self._inputs = Linear(declare, [of_heads("q_proj", self._head_size, hidden), latents])
        else:
            narrow = Part(Wanted.whole(f"{prefix}.q_a_proj.weight", (rank, hidden)))
            self._inputs = Linear(declare, [narrow, latents])
            self._query_norm = Vector(declare, f"{prefix}.q_a_layernorm.weight", rank)
            self._queries = Linear(declare, [of_heads("q_b_proj", self._head_size, rank)])
        self._norm = Vector(declare, f"{prefix}.kv_a_layernorm.weight", sizes.latent_size)
        expanding = of_heads("kv_b_proj", sizes.nope_size + sizes.value_size, sizes.latent_size)
        self._expanding = Expanding(declare, expanding.wanted, sizes.nope_size, sizes.value_size)
        whole = (hidden, heads * sizes.value_size)
        columns = (share[0] * sizes.value_size, share[1] * sizes.value_size)
        self._out = Linear(declare, [Part(Wanted.column_slice(f"{prefix}.o_proj.weight", whole, *columns))])

    def __call__(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sizes, clock = self._sizes, self._group.clock
        x = self._inputs(x_TH).float()
        queries, latent_TL, rope_TR = x.tensor_split(
            (x.shape[1] - sizes.latent_size - sizes.rope_size, x.shape[1] - sizes.rope_size), -1
        )
        if sizes.query_rank is not None:
            norm = self._query_norm.values
            normed = clock.run(Kind.OTHER, self._ops.rms_norm, queries, norm, LATENT_EPS)
            queries = self._queries(normed).float()
        attended = clock.run(Kind.ATTENTION, self._attend, queries, latent_TL, rope_TR, batch)
        return self._group.all_reduce(self._name, self._out(attended.flatten(1)))

    def _attend(
        self,
        queries: torch.Tensor,
        latent_TL: torch.Tensor,
        rope_TR: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Turns, writes the row of the pool, attends: [T, N, V]."""
        sizes, ops = self._sizes, self._ops
        queries_TND = queries.unflatten(-1, (self._num_heads, self._head_size))
        still_TNU, turning_TNR = queries_TND.split((sizes.nope_size, sizes.rope_size), -1)
        latent_TL = ops.rms_norm(latent_TL, self._norm.values, LATENT_EPS)
        # The rotary key turns as one more head.
        turned = ops.rotate(torch.cat((turning_TNR, rope_TR[:, None]), 1), batch.turn_TD)
        turned_TNR, key_T1R = turned.tensor_split((self._num_heads,), 1)
        rows = batch.keys[self._layer]
        row = torch.cat((latent_TL[:, None], key_T1R), -1)
        rows.index_copy_(0, batch.write_slots_T, pack(row, rows.dtype))
        if batch.own is not None:
            return self._plain(torch.cat((still_TNU, turned_TNR), -1), row[:, 0], batch.own)
        latent_TNL = self._expanding.keys(still_TNU).float()
        query = torch.cat((latent_TNL, turned_TNR), -1)
        return self._expanding.values(ops.attend(query, rows, rows, batch.attention))

    def record(self, tape: Tape, x: Any) -> None:
        """Takes down `__call__` with the addition to the residual stream."""
        sizes = self._sizes
        entry = sizes.latent_size + sizes.rope_size
        inputs = tape.product(self._inputs.operators, x, None, "latents")
        queries = inputs[:, : inputs.shape[1] - entry]
        if sizes.query_rank is not None:
            narrow = tape.norm_of(queries, self._query_norm.values, LATENT_EPS, "latents of queries")
            queries = tape.product(self._queries.operators, narrow, None, "queries")
        expanding = self._expanding
        rows = LatentRows(queries, inputs[:, -entry:], sizes, expanding.keys, expanding.values)
        attended = tape.attend_latents(rows, self._layer, (self._norm.values, LATENT_EPS))
        reduce = partial(self._group.all_reduce, self._name) if self._group.size > 1 else None
        tape.add_product(self._out.operators, attended, None, reduce)

    def _plain(self, queries_TND: torch.Tensor, row_TL: torch.Tensor, own: OwnRows) -> torch.Tensor:
        """[T, N, V] of rows that attend to rows of this step only."""
        latent_TL, key_TR = row_TL.split((self._sizes.latent_size, self._sizes.rope_size), -1)
        still_TNU = self._expanding.keys.back(latent_TL)
        assert still_TNU is not None, "operators that promise bits take the absorbed form"
        turned_TNR = key_TR[:, None].expand(-1, self._num_heads, -1)
        keys = torch.cat((still_TNU.float(), turned_TNR), -1)
        values = self._expanding.values(latent_TL[:, None].expand(-1, self._num_heads, -1))
        # Padded columns point at slot 0, which is zero as in the pool.
        keys, values = (torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 1, 0)) for x in (keys, values))
        dtypes = (self._ops.key_dtype, self._ops.value_dtype)
        return self._ops.attend(queries_TND, keys.to(dtypes[0]), values.to(dtypes[1]), own.attention)


# The matrix that makes keys and values of latents (kv_b_proj), as two products for each head. In the
# absorbed form the keys' part is applied to queries, transposed. Plain formats keep their bits when they
# are transposed; others become float32.


class Expanding:
    """`keys` brings queries [T, N, U] into the space of latents; `values` brings latents back [T, N, V].

    `wanted`: this rank's heads, each with `nope_size` (U) rows for keys and then `value_size` (V) for values.
    """

    keys: HeadsOp
    values: HeadsOp

    def __init__(self, declare: Declaration, wanted: Wanted, nope_size: int, value_size: int) -> None:
        self._ops, self._wanted = declare.ops, wanted
        self._sizes = (nope_size, value_size)
        declare.will_lay_out(self._kinds)
        declare.want(wanted, self._take)

    def _kinds(self, checkpoint: Checkpoint) -> list[MatrixKind]:
        facts = checkpoint.tensors.get(self._wanted.name)
        if facts is None:
            return []  # the reader will say that it is missing
        nope_size, value_size = self._sizes
        rows, latent_size = self._wanted.slice_shape
        turned = facts.format if facts.format in UNQUANTIZED else "F32"
        each = [
            MatrixKind(HEADS, turned, (latent_size, nope_size)),
            MatrixKind(HEADS, facts.format, (value_size, latent_size)),
        ]
        return each * (rows // (nope_size + value_size))

    def _take(self, weight: Weight) -> None:
        require_order(self._ops, self._wanted.name, weight)
        nope_size, value_size = self._sizes
        inputs = weight.shape[1]
        keys, values = [], []
        for head in weight.raw.split(nope_size + value_size):
            of_keys, of_values = head.split((nope_size, value_size))
            keys.append(StoredMatrix(transposed(replace(weight, shape=(nope_size, inputs), raw=of_keys))))
            values.append(StoredMatrix(replace(weight, shape=(value_size, inputs), raw=of_values)))
        self.keys, self.values = self._ops.heads_linear(keys), self._ops.heads_linear(values)


def transposed(weight: Weight) -> Weight:
    """The weight [I, O] of one [O, I]."""
    plain = UNQUANTIZED.get(weight.format)
    values = dequantize(weight) if plain is None else plain.view(weight)
    turned = values.t().contiguous()
    return Weight(weight.format if plain else "F32", tuple(turned.shape), turned.view(torch.uint8))
