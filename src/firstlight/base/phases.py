"""The phases of a process's life, and the reporter through which its code says where it is.

Written by every process of ours into its black box, read by the supervisor. Standard library only, so that a
process can say that it is about to import torch. Invariant: a phase's unit means something: bytes are
resident in their final place, ranks have arrived, layers are built.
"""

from __future__ import annotations

from firstlight.base.blackbox.recorder import Recorder

SPAWN = "spawn"  # written by the supervisor, before the process exists
READY = "ready"
SERVING = "serving"
DRAIN = "drain"
PHASES = (
    SPAWN,
    "imports",
    "device",
    "rendezvous",
    "build",
    "weights",
    "prepare",
    "drafter",
    "kv",
    "compile",
    "capture",
    "self-test",
    READY,
    "generate",  # offline: answers instead of a server
    SERVING,
    DRAIN,
)


class PhaseReporter:
    """Enters a phase when it is a new one, and moves its odometer otherwise."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._current: tuple[str, int, str, str] | None = None

    def report(self, phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        """Say where the process is. `total` 0: not known; a new total, unit or detail is a new entry."""
        current = (phase, total, unit, detail)
        if current != self._current:
            self._recorder.enter_phase(phase, total, unit, detail)
            self._current = current
        self._recorder.advance(done)
