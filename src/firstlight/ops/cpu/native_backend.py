"""The CPU backend of our own kernels: weights as the file has them, activations in 8 bits, KV in float16.

KV also in bfloat16 or int8, where that is asked for (see `ops.kv_rows`).

For `--dtype auto` where the native library loads. Row-invariant: see `native/program.h`. Invariant: the
operators called one by one here and recorded on a `contract.Tape` are the same and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from firstlight.facts.description import Experts
from firstlight.ops.contract import AttentionShape, LinearOp, MatrixKind, StepRows
from firstlight.ops.cpu.expert_layer import NativeExpertLayer
from firstlight.ops.cpu.experts import NativeExperts
from firstlight.ops.cpu.library import ATTEND, INSTRUCTION_SETS, KV_TYPES, NORM, SILU, Op, Pool, Step, address
from firstlight.ops.cpu.packed import (
    PACKED,
    Arena,
    NativeLinear,
    number_of,
    pack,
    packed_bytes,
)
from firstlight.ops.groups import ExpertLayerOp, GroupedLinearOp, HeadsOp
from firstlight.ops.heads import HeadsByGroup
from firstlight.ops.kv_rows import chosen
from firstlight.ops.matrix import Matrix

# Reading the latents anew costs a share about as much as one of its heads.
MOST_HEADS_OF_A_SHARE = 8


@dataclass(frozen=True)
class NativePlan:
    """A step's rows as the library reads them; the arrays are kept alive here."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    counts: np.ndarray[Any, np.dtype[np.int64]]
    pages_SP: np.ndarray[Any, np.dtype[np.int64]]
    branches_TW: np.ndarray[Any, np.dtype[np.int64]] | None
    page_size: int
    shape: AttentionShape

    def fill(self, step: Step) -> None:
        """Puts the rows into `step`."""
        step.num_sequences, step.table_width = self.pages_SP.shape
        step.page_size = self.page_size
        step.starts, step.counts = address(self.starts), address(self.counts)
        step.pages = address(self.pages_SP)
        if self.branches_TW is not None:
            step.branches, step.branch_width = address(self.branches_TW), self.branches_TW.shape[1]


def attention_op(shape: AttentionShape, row_stride: int, kv_dtype: torch.dtype) -> Op:
    """An attention operator without its addresses: queries, keys, values, float output, coded output."""
    shares = _shares_of_heads(shape.num_heads) if shape.is_latent else shape.num_kv_heads
    value_size = shape.out_size if shape.is_latent else 0
    sizes = (shape.num_heads, shares, shape.head_size, row_stride, shape.window or 0)
    op = Op(ATTEND, n=(*sizes, KV_TYPES[kv_dtype], value_size))
    op.f[0] = shape.scale
    return op


def _shares_of_heads(num_heads: int) -> int:
    """How many threads can share the heads of latent attention; each reads the latents anew."""
    smallest = -(-num_heads // MOST_HEADS_OF_A_SHARE)
    return next(num for num in range(smallest, num_heads + 1) if num_heads % num == 0)


# Formats whose layout does not say all by itself: what it is, and what it rounds.
_EXACT = "exact for bf16 scales from 2^-17 on and for fp16 ones, others rounded by up to 2^-11"
_CODES = "activations in 8 bits by groups of 32"
LAYOUT_WORDS = {
    "INT4": f"4-bit codes with fp16 scales of 32 ({_EXACT}), 4.5 bits a value; {_CODES}",
    "INT4_ZERO": f"4-bit codes with fp16 scales and zero points of 32 ({_EXACT}), 5 bits a value; {_CODES}",
    "INT8": f"8-bit codes with fp16 scales of 32 ({_EXACT}), 8.5 bits a value; {_CODES}",
    "FP8": "e4m3 codes with fp32 scales of 32, 9 bits a value, unrounded; activations in fp32",
    "FP4": "e2m1 codes with fp32 scales of 16, 6 bits a value, unrounded; activations in fp32",
}


FEW_THREADS = 8  # so many are planned for in any case: a start looks the same on small machines


class NativeBackend:
    """See `contract.Backend`."""

    name = "cpu-native"
    row_invariant = True
    device = torch.device("cpu")
    hands_out_rows = True
    groups_take_order = False  # their rows are multiplied as they come, sorted by group

    def __init__(self, pool: Pool, note: str = "", kv_dtype: str = "auto") -> None:
        self.pool = pool
        self.key_dtype = self.value_dtype = chosen(kv_dtype, torch.float16)
        instructions = INSTRUCTION_SETS[pool.instruction_set]
        self.reason = f"--device cpu: our own kernels for {instructions}, {pool.num_threads} threads"
        if note:
            self.reason += f"; {note}"
        self._arena = Arena()
        self._kinds: dict[MatrixKind, int] = {}

    def prepare(self, kinds: Sequence[MatrixKind], *, two_copies: bool) -> None:
        self._kinds |= {kind: self.resident_bytes(kind) for kind in kinds}

    def resident_bytes(self, kind: MatrixKind) -> int:
        return packed_bytes(kind.format, kind.shape)

    def loading_bytes(self, kind: MatrixKind) -> int:
        return self.resident_bytes(kind)  # the file's blocks are about as large

    def attention_bytes(self, shape: AttentionShape, num_tokens: int, max_position: int) -> int:
        # Each thread keeps the scores of a row's heads, and tables of a step's pages.
        return 4 * max_position * (shape.num_heads + 2) * max(FEW_THREADS, self.pool.num_threads)

    def layout_notes(self) -> list[str]:
        return [
            f"{kind.role} {kind.format} {kind.shape[0]}x{kind.shape[1]}: {_layout(kind.format)}"
            for kind in self._kinds
        ]

    def linear(self, weight: Matrix, *, role: str) -> LinearOp:
        outputs, inputs = weight.shape
        packed = self._arena.take(packed_bytes(weight.format, weight.shape))
        number = pack(weight, packed, self.pool)
        layout = _layout(weight.format)
        return NativeLinear(self.pool, (outputs, inputs), number, packed, layout, weight.order)

    def heads_linear(self, weights: Sequence[Matrix]) -> HeadsOp:
        return HeadsByGroup(self.grouped_linear(len(weights)), weights)

    def grouped_linear(self, num_groups: int) -> NativeExperts:
        return NativeExperts(self.pool, num_groups, self._arena)

    def expert_layer(
        self, rule: Experts, own: range, gate_up: GroupedLinearOp, down: GroupedLinearOp
    ) -> ExpertLayerOp:
        assert isinstance(gate_up, NativeExperts), "a backend takes its own operators"
        assert isinstance(down, NativeExperts), "a backend takes its own operators"
        return NativeExpertLayer(self.pool, rule, own, gate_up, down)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        if weight_H.dim() > 1:  # a weight for each head
            return self._norm_heads(x_TH, weight_H, eps)
        x = x_TH.contiguous()
        out = torch.empty_like(x)
        op = Op(NORM, n=(x.shape[-1],), p=(address(x), address(weight_H), address(out)))
        op.f[0] = eps
        self.pool.run([op], Step(num_rows=x.numel() // x.shape[-1]))
        return out

    def _norm_heads(self, x_THD: torch.Tensor, weight_HD: torch.Tensor, eps: float) -> torch.Tensor:
        heads = [
            self.rms_norm(x_THD[:, head], weight_HD[head].contiguous(), eps) for head in range(len(weight_HD))
        ]
        return torch.stack(heads, 1)

    def rotate(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        # Single operations, each rounded, as in the library: the bits agree.
        cos, sin = turn_TD[:, None, :, 0], turn_TD[:, None, :, 1]
        even, odd = x_TND[..., 0::2], x_TND[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def gated_silu(self, gate_up_TO: torch.Tensor) -> torch.Tensor:
        x = gate_up_TO.float().contiguous()
        width = x.shape[1] // 2
        out = torch.empty(len(x), width)
        self.pool.run([Op(SILU, n=(width,), p=(address(x), address(out)))], Step(num_rows=len(x)))
        return out

    def plan_attention(self, rows: StepRows, shape: AttentionShape) -> NativePlan:
        return NativePlan(
            np.array(rows.starts, dtype=np.int64),
            np.array(rows.counts, dtype=np.int64),
            np.ascontiguousarray(rows.page_table_SP, dtype=np.int64),
            rows.branches_TW,
            rows.page_size,
            shape,
        )

    def attend(
        self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        q = q_TND if q_TND.stride()[1:] == (q_TND.shape[2], 1) else q_TND.contiguous()
        out = torch.empty(*q.shape[:2], plan.shape.out_size)
        op = attention_op(plan.shape, q.stride(0), keys.dtype)
        for place, tensor in enumerate((q, keys, values, out)):
            op.p[place] = address(tensor)
        step = Step(num_rows=len(q))
        plan.fill(step)
        self.pool.run([op], step)
        return out


def _layout(weight_format: str) -> str:
    if weight_format in LAYOUT_WORDS:
        return LAYOUT_WORDS[weight_format]
    if PACKED[number_of(weight_format)].dtype is None:
        return "the file's codes and scales, unrounded; activations in 8 bits by groups of 32"
    return "the file's values, unrounded; activations in fp32"
