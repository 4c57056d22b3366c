"""Decode steps as CUDA graphs: recorded once for a batch size and a history length, then replayed.

A step in which every sequence has one token is padded to the next recorded shape; everything else runs
eagerly. The recorder is a seam, so that tests on a CPU record into a plain closure. Invariant: a padded row
writes to the null page and its logits are cut off, so it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from firstlight.models.batch import ForwardBatch
from firstlight.models.decoder import Decoder
from firstlight.ops.padded_attention import Batch, power_of_two
from firstlight.ops.step_clock import StepClock

SMALLEST_LENGTH = 256

Replayed = Callable[[], torch.Tensor]
Recorder = Callable[[Callable[[], torch.Tensor]], Replayed]


@dataclass(frozen=True)
class Recorded:
    """A recorded step: its input tensors, which `load` overwrites, and what runs it."""

    inputs: ForwardBatch
    replay: Replayed

    def load(self, batch: ForwardBatch) -> None:
        """Copies a step of the same or a smaller shape into the inputs."""
        _put(self.inputs.tokens_T, batch.tokens_T)
        _put(self.inputs.turn_TD, batch.turn_TD)
        _put(self.inputs.write_slots_T, batch.write_slots_T)
        for target, source in zip(_plans(self.inputs), _plans(batch), strict=True):
            _put(target.slots_BL, source.slots_BL)
            _put(target.mask_B1CL, source.mask_B1CL)
            # A padded row sees position 0 alone: a row that sees nothing would be NaN.
            target.mask_B1CL[source.mask_B1CL.shape[0] :, :, :, 0] = True

    def hand_out(self, batch: ForwardBatch) -> None:
        """Copies the captured states, if there are any, into a step that was loaded and replayed."""
        if batch.states_TCH is not None and self.inputs.states_TCH is not None:
            batch.states_TCH.copy_(self.inputs.states_TCH[: len(batch.states_TCH)])


class CudaGraphReplay:
    """See the module, and `replay.Replay`. Graphs are recorded when their shape first comes.

    `clock`: the rank's. Steps that it times run eagerly, since a graph has no places to look at it.
    """

    def __init__(self, model: Decoder, record: Recorder, clock: StepClock | None = None) -> None:
        self._model = model
        self._record = record
        self._clock = clock or StepClock()
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        num_rows = len(batch.tokens_T)
        if self._clock.is_on or not _is_decode(batch):
            return self._model(batch)
        length = max(plan.slots_BL.shape[1] for plan in _plans(batch))
        key = (power_of_two(num_rows), max(SMALLEST_LENGTH, power_of_two(length)))
        if key not in self._recorded:
            inputs = _padded(batch, *key)
            self._recorded[key] = Recorded(inputs, self._record(lambda: self._model(inputs)))
        recorded = self._recorded[key]
        recorded.load(batch)
        logits = recorded.replay()[:num_rows]
        recorded.hand_out(batch)
        return logits


def record_graph(run: Callable[[], torch.Tensor]) -> Replayed:
    """Records `run` into a CUDA graph, after a warm-up on a stream of its own as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def _plans(batch: ForwardBatch) -> list[Batch]:
    """The plan of a decode step, and that of layers without the window where some have one."""
    return [*batch.attention, *(batch.full_attention or ())]


def _is_decode(batch: ForwardBatch) -> bool:
    num_rows, num_kinds = len(batch.tokens_T), 1 + (batch.full_attention is not None)
    plans = _plans(batch)
    if len(plans) != num_kinds or len(batch.logit_rows_L) != num_rows:
        return False
    return all(plan.rows_BC.shape == (num_rows, 1) for plan in plans)


def _padded(batch: ForwardBatch, num_rows: int, length: int) -> ForwardBatch:
    """Inputs of a recorded shape, on the device of the batch: all rows padded."""
    device = batch.tokens_T.device
    rows = torch.arange(num_rows, device=device)
    return ForwardBatch(
        tokens_T=torch.zeros_like(rows),
        turn_TD=torch.zeros(num_rows, *batch.turn_TD.shape[1:], device=device),
        write_slots_T=torch.zeros_like(rows),
        logit_rows_L=rows,
        attention=[_padded_plan(batch.attention[0], num_rows, length)],
        full_attention=batch.full_attention and [_padded_plan(batch.full_attention[0], num_rows, length)],
        keys=batch.keys,
        values=batch.values,
        states_TCH=None if batch.states_TCH is None else _room(batch.states_TCH, num_rows),
    )


def _padded_plan(plan: Batch, num_rows: int, length: int) -> Batch:
    device = plan.slots_BL.device
    mask = torch.zeros(num_rows, 1, 1, length, dtype=torch.bool, device=device)
    mask[..., 0] = True
    return Batch(
        shape=plan.shape,
        rows_BC=torch.arange(num_rows, device=device)[:, None],
        valid_BC=None,
        slots_BL=torch.zeros(num_rows, length, dtype=torch.int64, device=device),
        mask_B1CL=mask,
    )


def _room(states_TCH: torch.Tensor, num_rows: int) -> torch.Tensor:
    return states_TCH.new_zeros(num_rows, *states_TCH.shape[1:])


def _put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes `source` into the leading corner of `target`; the rest becomes zero."""
    target.zero_()
    corner = target
    for dim, size in enumerate(source.shape):
        corner = corner.narrow(dim, 0, size)
    corner.copy_(source)
