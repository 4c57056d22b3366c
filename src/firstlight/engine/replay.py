"""The replay seam: how a forward pass reaches the device, eagerly or as it was recorded.

The runner calls `run` for every step. `RecordedReplay` runs our own CPU kernels as one program, whatever the
number of rows; `cuda_replay.CudaGraphReplay` records decode steps of a few batch sizes. Invariant: a replay
gives what the eager pass gives.
"""

from __future__ import annotations

from typing import Protocol

import torch

from firstlight.engine.kv import KVPool
from firstlight.models.batch import ForwardBatch
from firstlight.models.decoder import Decoder
from firstlight.ops.contract import AttentionShape
from firstlight.ops.cpu.library import Step
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.tape import NativeTape


class Replay(Protocol):
    """Owns the model of a rank."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, V]. The result may be overwritten by the next call."""
        ...


class EagerReplay:
    """Runs the model's Python every time."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model(batch)


class RecordedReplay:
    """Runs the model as one program of the native library, recorded when the first step comes.

    `max_rows`: the rows for which buffers are made; a longer step makes them anew.
    """

    def __init__(
        self, model: Decoder, ops: NativeBackend, shape: AttentionShape, pool: KVPool, max_rows: int
    ) -> None:
        self._model, self._ops, self._shape, self._pool = model, ops, shape, pool
        self._max_rows = max_rows
        self._tape: NativeTape | None = None

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        num_rows = len(batch.tokens_T)
        if self._tape is None or num_rows > self._tape.max_rows:
            self._tape = self._record(max(num_rows, self._max_rows))
        step = Step(
            num_rows=num_rows,
            num_logits=len(batch.logit_rows_L),
            tokens=batch.tokens_T.data_ptr(),
            turns=batch.turn_TD.data_ptr(),
            write_slots=batch.write_slots_T.data_ptr(),
            logit_rows=batch.logit_rows_L.data_ptr(),
        )
        batch.attention.fill(step)
        return self._tape.run(step, batch.tokens_T)

    def _record(self, max_rows: int) -> NativeTape:
        hidden = self._model.description.hidden_size
        tape = NativeTape(self._ops, self._shape, (self._pool.keys, self._pool.values), max_rows, hidden)
        self._model.record(tape)
        return tape
