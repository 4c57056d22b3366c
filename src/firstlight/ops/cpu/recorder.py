"""A forward pass taken down once, as programs of the native library that run on any number of rows.

The layers of a model record themselves on a `Tape` (see `contract.Tape`); `engine.worker.replay` runs it: in
one call for a single rank, and for several ranks in one call from each collective to the next. Invariant:
every address in a program belongs to a tensor that the tape, the model or the KV pool keeps alive.

Shapes: R most rows of a step, H hidden, V vocabulary, C captured states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from firstlight.base.blackbox.layout import NUMBER_BITS
from firstlight.ops.contract import AttentionShape, Collective, LatentRows, Norms
from firstlight.ops.cpu.expert_layer import NativeExpertLayer, Room
from firstlight.ops.cpu.latent import latent_ops
from firstlight.ops.cpu.library import (
    ADD_TO_OUTPUT,
    COPY,
    KV_TYPES,
    LOGIT_ROWS,
    NORM,
    QUANTIZE,
    SILU,
    TURN_AND_WRITE,
    Codes,
    Op,
    Step,
    address,
)
from firstlight.ops.cpu.native_backend import NativeBackend, attention_op
from firstlight.ops.cpu.packed import NativeLinear
from firstlight.ops.cpu.recorder_buffers import Activation, Buffers, Part


class NativeTape:
    """See `contract.Tape`. Buffers are for `max_rows` rows and shared by all layers.

    `widths`: the hidden size, and the number of captured states. `name` gives the number of a text in the
    black box. `step_batch` gives the batch of the step that runs, for layers that are called.
    """

    def __init__(
        self,
        ops: NativeBackend,
        shape: AttentionShape,
        pool: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        max_rows: int,
        widths: tuple[int, int],
        name: Callable[[str], int],
    ) -> None:
        self.max_rows = max_rows
        hidden, num_states = widths
        self.residual = torch.zeros(max_rows, hidden)
        self.states_RCH = torch.zeros(max_rows, num_states, hidden)
        self.step_batch: Callable[[], Any] = _no_batch
        self._ops, self._shape = ops, shape
        self._keys, self._values = pool
        self._parts = [Part()]
        self._layer = 0
        self._name = name
        self._buffers = Buffers(max_rows)
        self._of_experts: Room | None = None
        self._kept: list[torch.Tensor] = []  # that programs have the addresses of, and nobody else holds
        self._embedding: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head: Op | None = None
        self._logits = torch.empty(0, 0)
        self._gather: Collective | None = None

    def enter(self, layer: int) -> None:
        self._layer = layer + 1

    def embed(self, weight: Any, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if isinstance(weight, NativeLinear):
            self._append(weight.embed_op(self.residual), "embedding")
        else:
            self._embedding = look_up

    def capture(self, place: int) -> None:
        width, wide = self.residual.shape[1], self.states_RCH.stride(0)
        to = self.states_RCH[:, place]
        self._append(Op(COPY, n=(width, wide), p=(address(self.residual), address(to))), "state")

    def norm(self, weight_H: torch.Tensor, eps: float, *, of_logit_rows: bool = False) -> Activation:
        width = len(weight_H)
        flags = LOGIT_ROWS if of_logit_rows else 0
        op = Op(NORM, flags, n=(width, of_logit_rows), p=(address(self.residual), address(weight_H)))
        op.f[0] = eps
        self._layer = 0 if of_logit_rows else self._layer
        self._append(op, "norm")
        return Activation(op, width, 2, 3, "normed", of_logit_rows)

    def product(
        self, weights: Sequence[Any], x: Activation, bias: torch.Tensor | None, name: str
    ) -> torch.Tensor:
        width = sum(weight.shape[0] for weight in weights)
        out = self._buffers.floats(name, width)
        self._multiply(weights, x, bias, out)
        return out

    def add_product(
        self, weights: Sequence[Any], x: Activation, bias: torch.Tensor | None, reduce: Collective | None
    ) -> None:
        if reduce is None:
            self._multiply(weights, x, bias, self.residual, ADD_TO_OUTPUT)
            return
        share = self._share
        self._multiply(weights, x, None, share)
        self._collect(share, reduce, bias)

    def experts(
        self,
        layer: Any,
        scores: torch.Tensor,
        bias_E: torch.Tensor | None,
        x: Activation,
    ) -> torch.Tensor:
        assert isinstance(layer, NativeExpertLayer), "a tape takes the experts of its own backend"
        room = self._of_experts = self._of_experts or layer.room(self.max_rows)
        rows = self._codes_of(x) if layer.takes_codes else self._floats_of(x)
        recorded = layer.record(rows, scores, bias_E, self._share, room)
        self._kept.append(recorded.starts)
        for op in recorded.ops:
            self._append(op, "experts")
        return self._share

    def add_to_share(self, share: torch.Tensor, weights: Sequence[Any], x: Activation) -> None:
        self._multiply(weights, x, None, share, ADD_TO_OUTPUT)

    def add_share(self, share: torch.Tensor, reduce: Collective | None) -> None:
        if reduce is not None:
            self._collect(share, reduce, None)
            return
        sizes = (share.shape[1], self.residual.shape[1])
        places = (address(share), address(self.residual))
        self._append(Op(COPY, ADD_TO_OUTPUT, n=sizes, p=places), "sum of experts")

    @property
    def _share(self) -> torch.Tensor:
        return self._buffers.floats("share of a sum", self.residual.shape[1])

    def _collect(self, share: torch.Tensor, reduce: Collective, bias: torch.Tensor | None) -> None:
        def collect(num_rows: int) -> None:
            whole = reduce(share[:num_rows])
            self.residual[:num_rows] += whole if bias is None else whole + bias

        self._then(collect)

    def add_called(self, layer: Callable[[torch.Tensor, Any], torch.Tensor], x: Activation) -> None:
        floats = self._floats_of(x)

        def call(num_rows: int) -> None:
            self.residual[:num_rows] += layer(floats[:num_rows], self.step_batch())

        self._then(call)

    def logits(self, weights: Sequence[Any], x: Activation, gather: Collective | None) -> None:
        (weight,) = weights
        self._logits = torch.empty(1, weight.shape[0])
        self._multiply(weights, x, None, self._logits)
        self._head = self._parts[-1].ops[-1]
        self._gather = gather

    def gated_silu(self, gate_up: torch.Tensor, name: str = "inner") -> Activation:
        width = gate_up.shape[1] // 2
        op = Op(SILU, n=(width,), p=(address(gate_up),))
        self._append(op, "gate")
        return Activation(op, width, 1, 2, name)

    def norm_of(self, x: torch.Tensor, weight_H: torch.Tensor, eps: float, name: str) -> Activation:
        width = len(weight_H)
        op = Op(NORM, n=(width, 0, x.stride(0)), p=(address(x), address(weight_H)))
        op.f[0] = eps
        self._append(op, "norm")
        return Activation(op, width, 2, 3, name)

    def attend_latents(self, rows: LatentRows, layer: int, norm: tuple[torch.Tensor, float]) -> Activation:
        recorded = latent_ops(rows, norm, self._keys[layer], self._shape, self._buffers)
        for name, op in recorded.named:
            self._append(op, name)
        return Activation(op, recorded.attended.shape[1], 3, 4, "attended", floats=recorded.attended)

    def attend(
        self, qkv: torch.Tensor, layer: int, norms: Norms, eps: float, *, windowed: bool
    ) -> Activation:
        shape = self._shape if windowed else self._shape.full or self._shape
        keys, values = address(self._keys[layer]), address(self._values[layer])
        places = (address(qkv), keys, values, *(address(norm) for norm in norms))
        kv_dtype = self._keys[layer].dtype
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_size, KV_TYPES[kv_dtype])
        turn = Op(TURN_AND_WRITE, n=sizes, p=places)
        turn.f[0] = eps
        op = attention_op(shape, qkv.shape[1], kv_dtype)
        op.p[0], op.p[1], op.p[2] = address(qkv), keys, values
        self._append(turn, "rotary and KV write")
        self._append(op, "attention")
        return Activation(op, shape.num_heads * shape.head_size, 3, 4, "attended")

    @property
    def operators(self) -> list[Op]:
        return [op for part in self._parts for op in part.ops]

    def run(self, step: Step, tokens_T: np.ndarray, counter: int = 0, number: int = 0) -> torch.Tensor:
        """Runs the programs; logits [step.num_logits, V], which the next call may overwrite.

        `counter` and `number` as in `Pool.run`.
        """
        num_rows, num_logits = step.num_rows, step.num_logits
        if self._embedding is not None:
            self.residual[:num_rows] = self._embedding(torch.from_numpy(tokens_T))
        if num_logits > len(self._logits):
            self._logits = torch.empty(num_logits, self._logits.shape[1])
            self._parts[-1].program = None
        for part in self._parts:
            program = part.program or self._finish(part)
            if part.then is None:
                self._ops.pool.run(program, step, counter, number)
                continue
            if part.ops:
                self._ops.pool.run(program, step)
            part.then(num_rows)
        logits = self._logits[:num_logits]
        return logits if self._gather is None else self._gather(logits)

    def _finish(self, part: Part) -> ctypes.Array[Op]:
        """Makes the array that the library reads, which has the addresses as they are now."""
        assert self._head is not None, "the model recorded no head"
        self._head.p[3] = address(self._logits)
        part.program = (Op * len(part.ops))(*part.ops)
        return part.program

    def _then(self, action: Callable[[int], object]) -> None:
        self._parts[-1].then = action
        self._parts.append(Part())

    def _append(self, op: Op, name: str) -> None:
        op.label = self._name(name) << NUMBER_BITS | self._layer
        self._parts[-1].ops.append(op)

    def _multiply(
        self,
        weights: Sequence[Any],
        x: Activation,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        flags: int = 0,
    ) -> None:
        """Several weights of one input write side by side."""
        first = 0
        for weight in weights:
            assert isinstance(weight, NativeLinear), "a tape takes the weights of its own backend"
            last = first + weight.shape[0]
            part = bias[first:last] if bias is not None else None
            codes = self._codes_of(x) if weight.takes_codes and weight.order is None else None
            floats = None if weight.takes_codes else self._floats_of(x)
            if weight.order is not None:
                codes = self._ordered_codes(x, weight.order)
            op = weight.op(codes, floats, out[:, first:last], part)
            op.flags = flags | (LOGIT_ROWS if x.of_logit_rows else 0)
            self._append(op, f"product of {x.name}")
            first = last

    def _ordered_codes(self, x: Activation, order: torch.Tensor) -> Codes:
        """Codes of inputs in the order that a weight wants; between two programs, for few files need it."""
        assert not x.of_logit_rows, "the output head has its columns in place"
        floats, name = self._floats_of(x), f"{x.name} in another order"
        room = self._buffers.floats(name, x.width)

        def put(num_rows: int) -> None:
            torch.index_select(floats[:num_rows], 1, order, out=room[:num_rows])

        self._then(put)
        codes = self._buffers.codes(name, x.width)
        self._append(Op(QUANTIZE, n=(x.width,), p=(address(room), codes.address)), "order")
        return codes

    def _floats_of(self, x: Activation) -> torch.Tensor:
        if x.floats is not None:
            return x.floats
        room = self._buffers.floats(x.name, x.width)
        x.op.p[x.floats_place] = address(room)
        return room

    def _codes_of(self, x: Activation) -> Codes:
        codes = self._buffers.codes(x.name, x.width)
        if x.floats is None:
            x.op.p[x.codes_place] = codes.address
        else:
            self._append(Op(QUANTIZE, n=(x.width,), p=(address(x.floats), codes.address)), "codes")
        return codes


def _no_batch() -> Any:
    raise AssertionError("a layer is called, and nobody said with what")
