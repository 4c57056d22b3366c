"""The fast CPU backend: the best stock PyTorch operator for each weight shape, measured at start.

Compute type: residual stream, norms, keys and scores in float32; values and their weights in float16; matrix
products in the layout's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from firstlight.ops import padded_attention, sparse_attention
from firstlight.ops.contract import HEADS, ROUTER, AttentionShape, LinearOp, MatrixKind, StepRows
from firstlight.ops.cpu.layouts import FloatLinear, weight_error
from firstlight.ops.cpu.select import Choice, choose
from firstlight.ops.expert_layer import ByOperators
from firstlight.ops.groups import HeadsOp
from firstlight.ops.heads import HeadsByBatch
from firstlight.ops.matrix import Matrix

# From this many rows of one sequence on, blocked attention beats one row at a time.
MIN_BLOCKED_ROWS = 32
ERROR_SAMPLE_ROWS = 1024
_IN_FLOAT32 = (ROUTER, HEADS)


@dataclass(frozen=True)
class CpuAttentionPlan:
    shape: AttentionShape
    sparse: sparse_attention.SparsePlan | None
    batches: list[padded_attention.Batch]


class CpuBackend(ByOperators):
    """See `contract.Backend`. `prepare` must run before the first `linear`."""

    name = "cpu"
    row_invariant = False
    device = torch.device("cpu")
    key_dtype = torch.float32  # the sampled product takes nothing narrower
    value_dtype = torch.float16

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.choices: dict[MatrixKind, Choice] = {}
        self._eps: dict[float, torch.Tensor] = {}
        self.errors: dict[MatrixKind, float] = {}  # largest weight error, on a sample of each kind

    def prepare(self, kinds: Sequence[MatrixKind], *, two_copies: bool) -> None:
        measured = [kind for kind in kinds if kind.role not in _IN_FLOAT32]
        self.choices |= choose(measured, two_copies=two_copies)

    def resident_bytes(self, kind: MatrixKind) -> int:
        if kind.role in _IN_FLOAT32:
            return kind.shape[0] * kind.shape[1] * 4
        return self.choices[kind].resident_bytes(kind)

    def layout_notes(self) -> list[str]:
        return [
            f"{kind.role} {kind.format} {kind.shape[0]}x{kind.shape[1]}: {choice.reason}; "
            f"largest weight error {self.errors.get(kind, 0.0):.1e} of the largest weight"
            for kind, choice in self.choices.items()
        ]

    def linear(self, weight: Matrix, *, role: str) -> LinearOp:
        if role == ROUTER:
            return FloatLinear(weight)
        num_outputs, num_inputs = weight.shape
        kind = MatrixKind(role, weight.format, (num_outputs, num_inputs))
        if kind not in self.choices:
            self.choices |= choose([kind], two_copies=False)
        choice = self.choices[kind]
        if kind not in self.errors:
            # A sample of the first matrix of a kind: measuring all would double the time of loading.
            sample = weight.first_rows(ERROR_SAMPLE_ROWS)
            self.errors[kind] = max(weight_error(name, sample) for name in (choice.few, choice.many))
        return choice.build(weight)

    def heads_linear(self, weights: Sequence[Matrix]) -> HeadsOp:
        return HeadsByBatch(weights, torch.float32, self.device)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        # Half the time of F.rms_norm at one row: one reduction, and eps + norm^2 / H as one operator.
        norm = torch.linalg.vector_norm(x_TH, 2, -1, True)
        if eps not in self._eps:
            self._eps[eps] = torch.tensor(eps)
        scale = torch.addcmul(self._eps[eps], norm, norm, value=1.0 / x_TH.shape[-1]).rsqrt_()
        return torch.mul(x_TH, scale).mul_(weight_H)

    def rotate(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x_TND.unflatten(-1, (-1, 2)))
        turned = pairs * torch.view_as_complex(turn_TD).unsqueeze(1)
        return torch.view_as_real(turned).flatten(-2)

    def gated_silu(self, gate_up_TO: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TO.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def plan_attention(self, rows: StepRows, shape: AttentionShape) -> CpuAttentionPlan:
        blocked = [s for s, num in enumerate(rows.counts) if num >= MIN_BLOCKED_ROWS]
        if not blocked:
            return CpuAttentionPlan(shape, sparse_attention.plan(rows, shape), [])
        batches = padded_attention.plan(rows, shape, blocked, self.device)
        rest = np.flatnonzero(~np.isin(rows.sequence_T, blocked))
        sparse = sparse_attention.plan(rows, shape, rest) if len(rest) else None
        return CpuAttentionPlan(shape, sparse, batches)

    def attend(
        self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        out = torch.empty(*q_TND.shape[:2], plan.shape.out_size)
        if plan.sparse is not None:
            sparse_attention.attend(q_TND, keys, values, plan.sparse, out)
        if plan.batches:
            padded_attention.attend(q_TND, keys, values, plan.batches, out)
        return out
