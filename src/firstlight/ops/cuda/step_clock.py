"""The clock of a rank on a GPU: what the device does at a moment, not what the host has launched by then.

Where a kind begins, an event is recorded on the stream; the times between them are read when the turn ends.
Invariant: as with the host's clock, the kinds of a turn add up to its time: gaps in which the device waits
for launches belong to the kind that launches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import monotonic_ns
from typing import Any, Protocol

import torch

from firstlight.ops.step_clock import Kind, StepClock


class Event(Protocol):
    """Of `torch.cuda`."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another event."""
        ...


def cuda_event() -> Event:
    """On the current device."""
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


class EventClock(StepClock):
    """See the module."""

    def __init__(self, make_event: Callable[[], Event] = cuda_event) -> None:
        super().__init__()
        self._make_event = make_event
        self._marks: list[tuple[Kind, Event]] = []  # what the device did until there, since the turn began

    def turn(self, *, on: bool) -> tuple[list[int], int]:
        """See `StepClock.turn`; waits for what was launched in a turn that was recorded."""
        ended = super().turn(on=on)
        if on:
            self._begin(Kind.PYTHON)
        return ended

    def _end(self) -> int:
        self._begin(Kind.PYTHON)
        self._marks[-1][1].synchronize()
        for (_, start), (kind, end) in pairwise(self._marks):
            self._spent_ns[kind] += round(start.elapsed_time(end) * 1e6)
        self._marks = []
        return monotonic_ns()

    def _begin(self, kind: Kind) -> None:
        event = self._make_event()
        event.record()
        self._marks.append((self._kind, event))
        self._kind = kind
