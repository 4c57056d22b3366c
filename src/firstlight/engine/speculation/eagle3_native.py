"""The drafter's layer as programs of our own kernels: one call for a draft, one for a step's rows.

See `eagle3_layer.Layer`; made by `eagle3_load`. The layer's first products take embedding and state side by
side: here they are two products, the second added to the first, so that nothing is joined. Weights are
rounded to 8 bits, activations too: a draft that rounds changes no answer, only how often it is right.
Invariant: every address in a program belongs to a tensor that the layer keeps.

Shapes: T rows of a step, B sequences, L slots of the longest one, N heads, K key-value heads, D head size,
C captured states, H hidden, I inner size, R draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from firstlight.engine.speculation.deferred_kv_writes import TrueRows
from firstlight.engine.speculation.eagle3_layer import DraftRows
from firstlight.engine.worker.kv_pool import KVPool
from firstlight.models.eagle3 import Eagle3Drafter, RmsNorm
from firstlight.models.layers.linear import StoredMatrix, interleave_rows
from firstlight.models.layers.vocabulary import Embedding
from firstlight.ops.contract import AttentionShape
from firstlight.ops.cpu.library import (
    ADD_TO_OUTPUT,
    COPY,
    KV_TYPES,
    LARGEST,
    LOGIT_ROWS,
    NORM,
    QUANTIZE,
    SILU,
    TO_SLOTS,
    TURN_AND_WRITE,
    Codes,
    Op,
    Step,
    address,
)
from firstlight.ops.cpu.native_backend import NativeBackend, attention_op
from firstlight.ops.cpu.packed import NativeLinear
from firstlight.quant.q8_0 import as_q8_0

GROUP = 32  # inputs that share a scale
ROWS_AT_ONCE = 256  # of a step: so large are the buffers


@dataclass(frozen=True)
class Room:
    """How much there is to be room for. `num_slots`: with those for drafts."""

    num_slots: int
    num_drafting: int  # drafts at once
    num_positions: int
    page_size: int


def why_not(model: Eagle3Drafter) -> str | None:
    """Why a drafter of these sizes cannot run here, as the end of a sentence; None if it can."""
    c = model.config
    if c.latent is not None:
        return "its attention is latent"
    joined = len(c.state_layers) * c.target_hidden_size
    widths = (joined, c.hidden_size, c.num_heads * c.head_size, c.intermediate_size)
    wrong = [width for width in widths if width % GROUP]
    if wrong:
        return f"its width of {wrong[0]} is no multiple of {GROUP}"
    return f"its head size {c.head_size} is odd for our kernels" if c.head_size % 8 else None


class NativeLayer:
    """See the module. The target's `embedding` stands in for one of the drafter's own, where it has none."""

    def __init__(self, model: Eagle3Drafter, ops: NativeBackend, embedding: Embedding, room: Room) -> None:
        self._model, self._ops, self._room = model, ops, room
        c = self._config = model.config
        is_own = model.look_up is None
        found = None if is_own else embedding.operator
        self._table = found if isinstance(found, NativeLinear) else None
        self.shape = AttentionShape(c.num_heads, c.num_kv_heads, c.head_size, None)
        self.pool = KVPool(1, room.num_slots, self.shape, ops)
        self.pool.zero_null_page(room.page_size)
        self.states = torch.zeros(room.num_slots, c.hidden_size)
        self._turns = _turns(model, room.num_positions)
        self._weights = _Weights(model, ops)
        self._writing = _Writing(self)
        self._drafting = _Drafting(self)

    @property
    def num_bytes(self) -> int:
        """Of weights."""
        return sum(linear.num_bytes for linear in vars(self._weights).values())

    def write(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:
        """See `Layer`."""
        for first in range(0, len(rows.tokens), ROWS_AT_ONCE):
            self._writing.run(states_TCH, rows, slice(first, first + ROWS_AT_ONCE))

    def begin(self, before_B: np.ndarray) -> None:
        """See `Layer`."""
        self._drafting.hidden[: len(before_B)] = self.states[torch.from_numpy(before_B)]

    def draft(self, rows: DraftRows) -> tuple[np.ndarray, torch.Tensor]:
        """See `Layer`."""
        return self._drafting.run(rows)

    def follow(self, rows: np.ndarray) -> None:
        """See `Layer`."""
        hidden = self._drafting.hidden
        hidden[: len(rows)] = hidden[torch.from_numpy(rows)]

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """See `Layer`."""
        self.pool.move(from_slots, to_slots)
        self.states[list(to_slots)] = self.states[list(from_slots)]

    def kv_ops(self, qkv: torch.Tensor, num_heads: int) -> Op:
        """Turns queries (if any) and keys of rows, and writes keys and values to their slots."""
        c, keys, values = self._config, self.pool.keys[0], self.pool.values[0]
        sizes = (num_heads, c.num_kv_heads, c.head_size, KV_TYPES[keys.dtype])
        return Op(TURN_AND_WRITE, n=sizes, p=(address(qkv), address(keys), address(values)))

    def embed(self, program: list[Op], out: torch.Tensor) -> None:
        """Begins a program with the tokens' rows, where a program can look them up."""
        if self._table is not None:
            program.append(self._table.embed_op(out))

    def embed_beside(self, tokens: np.ndarray, out: torch.Tensor) -> None:
        """Looks the tokens' rows up where the program does not."""
        if self._table is None:
            out[: len(tokens)] = self._model.embed(torch.from_numpy(tokens))

    def norm(
        self, x: torch.Tensor | None, norm: RmsNorm, codes: Codes, into: torch.Tensor | None = None
    ) -> Op:
        """Codes of the normed rows; also as floats, if they go anywhere."""
        weight = norm.weight
        op = Op(NORM, n=(len(weight),), p=(address(x), address(weight), address(into), codes.address))
        op.f[0] = self._config.norm_eps
        return op

    def turn(self, positions: np.ndarray, out: np.ndarray) -> None:
        """The rotary pairs of positions."""
        self._turns.take(positions, 0, out[: len(positions)], "clip")  # "raise" would make a copy


class _Weights:
    """The drafter's matrices as operators; `key_values` is the lower part of `qkv` once more."""

    def __init__(self, model: Eagle3Drafter, ops: NativeBackend) -> None:
        c = model.config

        def lay_out(values_OI: torch.Tensor) -> NativeLinear:
            linear = ops.linear(StoredMatrix(as_q8_0(values_OI)), role="layer")
            assert isinstance(linear, NativeLinear), "a backend's own operator"
            return linear

        turned = [interleave_rows(p.weight.detach(), c.head_size) for p in (model.q_proj, model.k_proj)]
        qkv_OX = torch.cat([*turned, model.v_proj.weight.detach()])
        gate_up = torch.cat((model.gate_proj.weight, model.up_proj.weight))
        self.fuse = lay_out(model.fc.weight)
        self.qkv_of_token = lay_out(qkv_OX[:, : c.hidden_size].contiguous())
        self.qkv_of_state = lay_out(qkv_OX[:, c.hidden_size :].contiguous())
        self.out, self.gate_up = lay_out(model.o_proj.weight), lay_out(gate_up)
        self.down, self.head = lay_out(model.down_proj.weight), lay_out(model.lm_head.weight)

    def key_values(self, whole: NativeLinear, num_queries: int) -> NativeLinear:
        """The outputs of `whole` behind the queries: tiles in the same memory."""
        outputs, inputs = whole.shape
        first = len(whole.packed) // outputs * num_queries
        return NativeLinear(
            whole.pool, (outputs - num_queries, inputs), whole.number, whole.packed[first:], whole.layout
        )


class _Writing:
    """The program over a step's rows: fused states to their slots, and keys and values from those before."""

    def __init__(self, layer: NativeLayer) -> None:
        self._layer, model, weights = layer, layer._model, layer._weights
        c = model.config
        width, rows = c.hidden_size, ROWS_AT_ONCE
        joined, num_queries = len(c.state_layers) * c.target_hidden_size, c.num_heads * c.head_size
        num_outputs = 2 * c.num_kv_heads * c.head_size
        self._embedded, self._fused = torch.zeros(rows, width), torch.zeros(rows, width)
        kv = self._kv = torch.zeros(rows, num_outputs)
        self._codes = Codes(rows, joined), Codes(rows, width), Codes(rows, width)
        of_states, of_tokens, of_before = self._codes
        self._turns = np.zeros((rows, c.head_size // 2, 2), np.float32)
        self._step = Step(turns=address(self._turns))
        program: list[Op] = []
        self._reads = None if c.fc_norm else 0
        if model.input_norm is not None and not c.fc_norm:
            program.append(layer.norm(None, model.input_norm, of_states))
        elif not c.fc_norm:
            program.append(Op(QUANTIZE, n=(joined,), p=(None, of_states.address)))
        if not c.fc_norm:
            program.append(weights.fuse.op(of_states, None, self._fused))
        program.append(Op(COPY, TO_SLOTS, n=(width, width), p=(address(self._fused), address(layer.states))))
        layer.embed(program, self._embedded)
        program.append(layer.norm(self._embedded, model.input_layernorm, of_tokens))
        before = layer.norm(layer.states, model.hidden_norm, of_before)
        before.flags, before.n[1] = LOGIT_ROWS, 1  # the rows of the slots that `logit_rows` names
        program.append(before)
        program.append(weights.key_values(weights.qkv_of_token, num_queries).op(of_tokens, None, kv))
        add = weights.key_values(weights.qkv_of_state, num_queries).op(of_before, None, kv)
        add.flags = ADD_TO_OUTPUT
        program += [add, layer.kv_ops(kv, 0)]
        self._program: ctypes.Array[Op] = (Op * len(program))(*program)

    def run(self, states_TCH: torch.Tensor, rows: TrueRows, part: slice) -> None:
        layer, step = self._layer, self._step
        states, tokens = states_TCH[part], np.ascontiguousarray(rows.tokens[part])
        slots, before = np.ascontiguousarray(rows.slots[part]), np.ascontiguousarray(rows.before[part])
        if self._reads is None:
            self._fused[: len(tokens)] = layer._model.fuse(states)
        else:
            self._program[self._reads].p[0] = states.data_ptr()
        layer.embed_beside(tokens, self._embedded)
        layer.turn(rows.positions[part], self._turns)
        step.num_rows = step.num_logits = len(tokens)
        step.tokens, step.write_slots, step.logit_rows = address(tokens), address(slots), address(before)
        layer._ops.pool.run(self._program, step)


class _Drafting:
    """The program of a draft. The states that drafts follow are in `hidden`, and their outputs come there."""

    def __init__(self, layer: NativeLayer) -> None:
        self._layer, model, weights = layer, layer._model, layer._weights
        c = model.config
        rows, width, inner = layer._room.num_drafting, c.hidden_size, c.intermediate_size
        attended = c.num_heads * c.head_size
        self.hidden, self._embedded = torch.zeros(rows, width), torch.zeros(rows, width)
        qkv = self._qkv = torch.zeros(rows, weights.qkv_of_token.shape[0])
        gate_up = self._gate_up = torch.zeros(rows, 2 * inner)
        self.logits = torch.zeros(rows, c.draft_vocab_size)
        self._codes = tuple(Codes(rows, w) for w in (width, width, attended, width, inner, width))
        of_tokens, of_states, of_attended, of_middle, of_inner, of_output = self._codes
        self._turns = np.zeros((rows, c.head_size // 2, 2), np.float32)
        self._best, self._values = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        self._ones = np.ones(rows, np.int64)
        self._step = Step(turns=address(self._turns), counts=address(self._ones), page_size=1)
        program: list[Op] = []
        layer.embed(program, self._embedded)
        program.append(layer.norm(self._embedded, model.input_layernorm, of_tokens))
        residual = self.hidden if c.norm_before_residual else None
        program.append(layer.norm(self.hidden, model.hidden_norm, of_states, residual))
        program.append(weights.qkv_of_token.op(of_tokens, None, qkv))
        program.append(_adding(weights.qkv_of_state.op(of_states, None, qkv)))
        program += [layer.kv_ops(qkv, c.num_heads), _attention(layer, qkv, of_attended)]
        program.append(_adding(weights.out.op(of_attended, None, self.hidden)))
        program.append(layer.norm(self.hidden, model.post_attention_layernorm, of_middle))
        program.append(weights.gate_up.op(of_middle, None, gate_up))
        program.append(Op(SILU, n=(inner,), p=(address(gate_up), None, of_inner.address)))
        program.append(_adding(weights.down.op(of_inner, None, self.hidden)))
        fed_back = self.hidden if c.norm_output else None
        program.append(layer.norm(self.hidden, model.norm, of_output, fed_back))
        program.append(weights.head.op(of_output, None, self.logits))
        places = (address(self.logits), address(self._best), address(self._values))
        program.append(Op(LARGEST, n=(c.draft_vocab_size,), p=places))
        self._program: ctypes.Array[Op] = (Op * len(program))(*program)

    def run(self, rows: DraftRows) -> tuple[np.ndarray, torch.Tensor]:
        layer, step, num = self._layer, self._step, len(rows.tokens)
        layer.embed_beside(rows.tokens, self._embedded)
        layer.turn(rows.positions, self._turns)
        step.num_rows = step.num_sequences = num
        step.tokens, step.write_slots = address(rows.tokens), address(rows.slots)
        step.starts, step.pages, step.table_width = (
            address(rows.positions),
            address(rows.table),
            rows.table.shape[1],
        )
        layer._ops.pool.run(self._program, step)
        return self._best[:num], self.logits[:num]


def _adding(op: Op) -> Op:
    op.flags = ADD_TO_OUTPUT
    return op


def _attention(layer: NativeLayer, qkv: torch.Tensor, codes: Codes) -> Op:
    op = attention_op(layer.shape, qkv.shape[1], layer.pool.keys[0].dtype)
    op.p[0], op.p[1], op.p[2] = address(qkv), address(layer.pool.keys[0]), address(layer.pool.values[0])
    op.p[4] = codes.address
    return op


def _turns(model: Eagle3Drafter, num_positions: int) -> np.ndarray:
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), model.frequencies)
    turns = torch.stack((angles.cos(), angles.sin()), -1) * model.config.rope_scaling.turn_factor
    as_array: np.ndarray = turns.numpy()
    return as_array
