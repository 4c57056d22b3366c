"""The phases of a process's life, and the reporter through which its code says where it is.

Written by every process of ours into its black box, read by the supervisor. Standard library only, so that a
process can say that it is about to import torch. Invariant: a phase's unit means something: bytes are
resident in their final place, ranks have arrived, layers are built.
"""

from __future__ import annotations

from collections.abc import Mapping

from firstlight.base.blackbox.recorder import Recorder

SPAWN = "spawn"  # written by the supervisor, before the process exists
IMPORTS = "imports"
RENDEZVOUS = "rendezvous"
DRAFTER = "drafter"  # rank 0 alone: which drafter, and what it needs of the model
DEVICE = "device"
COMPILE = "compile"
BUILD = "build"
PREPARE = "prepare"
WEIGHTS = "weights"
KV = "kv"
CAPTURE = "capture"
SELF_TEST = "self-test"  # rank 0 alone: the others run its steps
READY = "ready"
GENERATE = "generate"  # offline: answers instead of a server
SERVING = "serving"
DRAIN = "drain"
# In the order of a start of ours: a rank passes over what it has not, and never goes back. `COMPILE` alone
# may also come within `RENDEZVOUS`, where kernels are missing. A foreign engine's order is its grammar's.
PHASES = (
    SPAWN,
    IMPORTS,
    RENDEZVOUS,
    DRAFTER,
    DEVICE,
    COMPILE,
    BUILD,
    PREPARE,
    WEIGHTS,
    KV,
    CAPTURE,
    SELF_TEST,
    READY,
    GENERATE,
    SERVING,
    DRAIN,
)
PLACES: Mapping[str, int] = {phase: place for place, phase in enumerate(PHASES)}


class PhaseReporter:
    """Enters a phase when it is a new one, and moves its odometer otherwise."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._current: tuple[str, int, str, str] | None = None

    def report(self, phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        """Say where the process is. `total` 0: not known; a new total, unit or detail is a new entry.

        Raises `ValueError` for what is none of `PHASES`.
        """
        if phase not in PLACES:
            raise ValueError(f"{phase!r} is no phase")
        current = (phase, total, unit, detail)
        if current != self._current:
            self._recorder.enter_phase(phase, total, unit, detail)
            self._current = current
        self._recorder.advance(done)
