"""Every operator in plain float32 torch: the meaning of correct, and the oracle of the fast versions.

Runs on a CPU as `--dtype float32`. Row-invariant: matrix products always have the same number of rows (a
tile, padded), attention computes each row by itself, and element-wise functions whose vector and scalar
versions differ in the last bit run on pieces that start at a vector and stay on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from firstlight.ops import sparse_attention
from firstlight.ops.contract import HEADS, AttentionShape, LinearOp, MatrixKind, StepRows
from firstlight.ops.expert_layer import ByOperators
from firstlight.ops.grouped import GroupByGroup
from firstlight.ops.groups import HeadsOp
from firstlight.ops.heads import HeadsByGroup
from firstlight.ops.kv_rows import chosen, unpack
from firstlight.ops.matrix import Matrix
from firstlight.ops.sigmoid import silu

# Rows of every matrix product. Larger is faster for prompts, smaller for single tokens; at 32 a product is
# still bound by reading the weights.
ROW_TILE = 32


class ReferenceLinear:
    """y = x W^T in float32, always on `ROW_TILE` rows at a time."""

    layout = "float32"

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight_OI = weight_OI
        self.num_bytes = weight_OI.numel() * 4

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        num_rows = x_TI.shape[0]
        tiles = -(-num_rows // ROW_TILE)
        padded = F.pad(x_TI, (0, 0, 0, tiles * ROW_TILE - num_rows))
        out = torch.empty(tiles * ROW_TILE, self.weight_OI.shape[0])
        for tile in range(tiles):
            rows = slice(tile * ROW_TILE, (tile + 1) * ROW_TILE)
            torch.mm(padded[rows], self.weight_OI.t(), out=out[rows])
        return out[:num_rows]

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor:
        return self.weight_OI.index_select(0, indices_T)


@dataclass(frozen=True)
class ReferencePlan:
    """`slots`: those of the pages that the step reads, the null page first; None: all of the pool.

    The chosen slots become float32 before anything else, and the sparse plan is over them alone.
    """

    sparse: sparse_attention.SparsePlan
    slots: torch.Tensor | None = None


class ReferenceBackend(ByOperators):
    """See `contract.Backend`."""

    name = "reference"
    row_invariant = True
    device = torch.device("cpu")

    def __init__(self, reason: str, kv_dtype: str = "auto") -> None:
        self.reason = reason
        self.key_dtype = self.value_dtype = chosen(kv_dtype, torch.float32)
        if kv_dtype != "auto":
            self.reason += f", but keys and values in {kv_dtype}"

    def prepare(self, kinds: Sequence[MatrixKind], *, two_copies: bool) -> None:
        pass  # float32 for everything

    def resident_bytes(self, kind: MatrixKind) -> int:
        return kind.shape[0] * kind.shape[1] * 4

    def layout_notes(self) -> list[str]:
        return ["every matrix: float32, nothing rounded"]

    def linear(self, weight: Matrix, *, role: str) -> LinearOp:
        return ReferenceLinear(weight.dequantize())

    def heads_linear(self, weights: Sequence[Matrix]) -> HeadsOp:
        return HeadsByGroup(GroupByGroup(len(weights), partial(self.linear, role=HEADS)), weights)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return x_TH * torch.rsqrt((x_TH * x_TH).mean(-1, keepdim=True) + eps) * weight_H

    def rotate(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        cos, sin = turn_TD[:, None, :, 0], turn_TD[:, None, :, 1]
        even, odd = x_TND[..., 0::2], x_TND[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def gated_silu(self, gate_up_TO: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TO.chunk(2, -1)
        return silu(gate) * up

    def plan_attention(self, rows: StepRows, shape: AttentionShape) -> ReferencePlan:
        if self.key_dtype == torch.float32:
            return ReferencePlan(sparse_attention.plan(rows, shape))
        pages, place = np.unique(np.append(rows.page_table_SP, 0), return_inverse=True)
        table_SP = place.reshape(-1)[:-1].reshape(rows.page_table_SP.shape)
        first = torch.from_numpy(pages)[:, None] * rows.page_size
        slots = (first + torch.arange(rows.page_size)).view(-1)
        return ReferencePlan(sparse_attention.plan(replace(rows, page_table_SP=table_SP), shape), slots)

    def attend(
        self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        out = torch.empty(*q_TND.shape[:2], plan.sparse.shape.out_size)
        if plan.slots is not None:
            is_latent = plan.sparse.shape.is_latent
            keys = unpack(keys[plan.slots])
            values = keys if is_latent else unpack(values[plan.slots])
        sparse_attention.attend(q_TND, keys, values, plan.sparse, out)
        return out
