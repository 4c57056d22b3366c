"""For how long each process of a run has made no useful progress, from cheap looks a few times a second.

Pure but for `read_marks`. Invariant: what counts is progress that means something (odometer, steps, bytes
read, pages faulted in); time passes for a process only while it has something to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from firstlight.base.blackbox.reader import NO_PLACE, Box, Place
from firstlight.base.phases import READY, SERVING
from firstlight.base.proc_stat import read_proc_stat


class Mark(msgspec.Struct, frozen=True):
    """Everything of one process that moves when it gets somewhere. `is_stopped`: by a signal or a tracer."""

    phase: int = 0
    done: int = 0
    steps: int = 0
    operator: Place = NO_PLACE  # within a recorded step
    read_bytes: int = 0
    major_faults: int = 0
    is_stopped: bool = False


class Pulses:
    """The latest marks, and since when they have been what they are."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._since_s: dict[str, float] = {}
        self._stopped_looks: dict[str, int] = {}

    def look(self, marks: Mapping[str, Mark], now_s: float) -> None:
        """New marks of all processes."""
        for name, mark in marks.items():
            if mark != self._marks.get(name):
                self._marks[name] = mark
                self._since_s[name] = now_s
            self._stopped_looks[name] = self._stopped_looks.get(name, 0) + 1 if mark.is_stopped else 0

    def rest(self, names: list[str], now_s: float) -> None:
        """These have nothing to do: their time does not pass."""
        for name in names:
            self._since_s[name] = now_s

    def quiet_s(self, now_s: float) -> dict[str, float]:
        """Seconds without progress, by process."""
        return {name: now_s - since_s for name, since_s in self._since_s.items()}

    def stopped(self) -> list[str]:
        """Who was stopped in two looks, one after the other."""
        return [name for name, looks in self._stopped_looks.items() if looks >= 2]


def read_mark(box: Box, pid: int) -> Mark:
    """The mark of one process; of one that is gone, what its box says."""
    phase = box.phase
    stat = read_proc_stat(pid)
    return Mark(
        phase=phase.number if phase else 0,
        done=phase.odometer.done if phase else 0,
        steps=box.step,
        operator=box.operator,
        read_bytes=_read_bytes(pid),
        major_faults=stat.major_faults if stat is not None else 0,
        is_stopped=stat is not None and stat.state in "Tt",
    )


def is_serving(box: Box) -> bool:
    """Whether its start is over."""
    return box.phase is not None and box.phase.name in (READY, SERVING)


def has_work(box: Box) -> bool:
    """Whether sequences wait for a step of this rank."""
    return box.running + box.waiting > 0


def longest_step_s(box: Box, max_tokens: int) -> float:
    """What the largest step could take, by the slowest of the largest in the ring; 0 when it is empty.

    Small steps would tell too much: their tokens cost more each.
    """
    steps = [event.values for event in box.events if event.name == "step" and event.values[2]]
    most = max((values[2] for values in steps), default=0)
    slowest_s = max((values[3] / 1e6 for values in steps if values[2] == most), default=0.0)
    return slowest_s * max_tokens / most if most else 0.0


def _read_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return int(next(line for line in file if line.startswith(b"read_bytes:")).split()[1])
    except (OSError, StopIteration):
        return 0
