"""The matrix that makes keys and values of latents (kv_b_proj), as two products for each head.

Used by `latent`. In the absorbed form the keys' part is applied to queries, transposed. Invariant: plain
formats keep their bits when they are transposed; others become float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from firstlight.facts.checkpoint import Checkpoint
from firstlight.loading.plan import Wanted
from firstlight.models.declare import Declaration
from firstlight.models.layers.grouped import require_order
from firstlight.models.layers.linear import StoredMatrix
from firstlight.ops.contract import HEADS, MatrixKind
from firstlight.ops.groups import HeadsOp
from firstlight.quant.registry import UNQUANTIZED, dequantize
from firstlight.quant.weight import Weight


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
