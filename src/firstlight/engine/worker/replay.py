"""The replay seam: how a forward pass reaches the device, eagerly or as it was recorded.

The runner calls `run` for every step. `RecordedReplay` runs our own CPU kernels as one program, whatever the
number of rows, and takes a step as numbers; `cuda_replay.CudaGraphReplay` records decode steps of a few batch
sizes. Invariant: a replay gives what the eager pass gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.kv_pool import KVPool
from firstlight.models.batch import ForwardBatch
from firstlight.models.decoder import Decoder
from firstlight.ops.contract import AttentionShape, Backend, StepRows
from firstlight.ops.cpu.library import Op, Pool, Step, address
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.recorder import NativeTape


def full_plan(rows: StepRows, shape: AttentionShape, ops: Backend) -> Any:
    """The plan for layers without the window; None where no layer has one, or all have."""
    return None if shape.full is None else ops.plan_attention(rows, shape.full)


class Replay(Protocol):
    """Owns the model of a rank."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, V], and the batch's states if it has room for them. The next call may overwrite both."""
        ...


class EagerReplay:
    """Runs the model's Python every time."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model(batch)


class RecordedReplay:
    """Runs the model as programs of the native library, recorded when the first step comes.

    A step is laid out in arrays that stay where they are. `max_rows`: the rows for which buffers are made; a
    longer step makes them anew. The black box is written by the library: the operator, and steps that ended.
    """

    def __init__(
        self, model: Decoder, ops: NativeBackend, shape: AttentionShape, pool: KVPool, max_rows: int
    ) -> None:
        self._model, self._ops, self._shape, self._pool = model, ops, shape, pool
        self._num_states = 0
        self._max_rows = max_rows
        self._tape: NativeTape | None = None
        self._recorder: Recorder = NoBox()
        self._step_place = 0
        self._arrays = StepArrays(0, 0)
        self._rows: StepRows | None = None
        self._batch: ForwardBatch | None = None

    @property
    def pool(self) -> Pool:
        return self._ops.pool

    @property
    def step(self) -> Step:
        """The last step, as the library read it."""
        return self._arrays.step

    def capture(self, layers: Sequence[int]) -> None:
        """Every step keeps these states; call before the first one. See `Decoder.capture`."""
        self._model.capture(layers)
        self._num_states = len(layers)

    def states(self, num_rows: int) -> torch.Tensor:
        """The captured states of the last step, float32 [T, C, H], which the next one overwrites."""
        assert self._tape is not None, "no step has run"
        return self._tape.states_RCH[:num_rows]

    @property
    def operators(self) -> list[Op]:
        """Of a step in their order, once one was recorded."""
        return [] if self._tape is None else self._tape.operators

    def watched_by(self, recorder: Recorder) -> None:
        """From now on `recorder` is told of each step; call before the first one."""
        self._recorder, self._step_place = recorder, recorder.place(Counter.STEP)
        self._ops.pool.watch(recorder.place(Counter.OPERATOR))

    def run(self, plan: StepPlan, rows: StepRows, turns: np.ndarray, logit_rows: np.ndarray) -> torch.Tensor:
        """Logits [L, V], which the next call overwrites. `turns` has a row for every position."""
        num_rows = len(plan.tokens)
        if self._tape is None or num_rows > self._tape.max_rows:
            self._tape = self._record(max(num_rows, self._max_rows), turns.shape[1])
        arrays = self._arrays
        self._rows, self._batch = rows, None
        arrays.fill(plan, rows, turns, logit_rows)
        return self._tape.run(arrays.step, arrays.tokens[:num_rows], self._step_place, plan.step + 1)

    def _step_batch(self) -> ForwardBatch:
        """The step as layers see it that are called; made for the first of them."""
        if self._batch is None:
            assert self._rows is not None, "no step has run"
            attention = self._ops.plan_attention(self._rows, self._shape)
            full = full_plan(self._rows, self._shape, self._ops)
            self._batch = self._arrays.batch(attention, full, self._pool)
        return self._batch

    def _record(self, max_rows: int, num_pairs: int) -> NativeTape:
        self._arrays = StepArrays(max_rows, num_pairs)
        hidden = self._model.description.hidden_size
        pool = (self._pool.keys, self._pool.values)
        widths = (hidden, self._num_states)
        tape = NativeTape(self._ops, self._shape, pool, max_rows, widths, self._recorder.name)
        tape.step_batch = self._step_batch
        self._model.record(tape)
        return tape


class StepArrays:
    """The arrays of a step of at most `max_rows` rows, and the structure that says where they lie.

    `num_pairs`: of a head's values, that turn together.
    """

    def __init__(self, max_rows: int, num_pairs: int) -> None:
        self._int64 = np.zeros((5, max_rows), np.int64)
        self.tokens, self._slots, self._logit_rows, self._starts, self._counts = self._int64
        self._turns = np.zeros((max_rows, num_pairs, 2), np.float32)
        self._pages = np.zeros((0, 0), np.int64)
        self._branches: np.ndarray | None = None
        self.step = Step(
            tokens=address(self.tokens),
            turns=address(self._turns),
            write_slots=address(self._slots),
            logit_rows=address(self._logit_rows),
            starts=address(self._starts),
            counts=address(self._counts),
        )

    def fill(self, plan: StepPlan, rows: StepRows, turns: np.ndarray, logit_rows: np.ndarray) -> None:
        """Lays out a step."""
        step, num_rows, num_sequences = self.step, len(plan.tokens), len(plan.counts)
        self.tokens[:num_rows] = plan.tokens
        self._slots[:num_rows] = rows.write_slots_T
        self._logit_rows[: len(logit_rows)] = logit_rows
        self._starts[:num_sequences] = plan.starts
        self._counts[:num_sequences] = plan.counts
        turns.take(rows.positions_T, 0, self._turns[:num_rows], "clip")  # "raise" would make a copy
        self._pages = rows.page_table_SP
        step.num_rows, step.num_logits, step.num_sequences = num_rows, len(logit_rows), num_sequences
        step.page_size, step.table_width = rows.page_size, self._pages.shape[1]
        step.pages = address(self._pages)
        if rows.branches_TW is not self._branches:
            self._branches = rows.branches_TW
            step.branches = address(self._branches)
            step.branch_width = 0 if self._branches is None else self._branches.shape[1]

    def batch(self, attention: Any, full_attention: Any, pool: KVPool) -> ForwardBatch:
        """The step that was filled in last, over the same memory."""
        num_rows, num_logits = self.step.num_rows, self.step.num_logits
        return ForwardBatch(
            tokens_T=torch.from_numpy(self.tokens[:num_rows]),
            turn_TD=torch.from_numpy(self._turns[:num_rows]),
            write_slots_T=torch.from_numpy(self._slots[:num_rows]),
            logit_rows_L=torch.from_numpy(self._logit_rows[:num_logits]),
            attention=attention,
            full_attention=full_attention,
            keys=pool.keys,
            values=pool.values,
        )
