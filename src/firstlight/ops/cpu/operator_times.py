"""How long the native library's operators take, by kind of work.

Handed to the `StepClock` of a rank by `engine.worker.assemble`. Invariant: the library reads a clock only
between `start` and `stop`.
"""

from __future__ import annotations

import ctypes

from firstlight.ops.cpu.library import (
    ATTEND,
    BY_HEAD,
    CHOOSE,
    COMBINE,
    EXPERTS,
    GATHER,
    HEADS,
    LATENT,
    LINEAR,
    NUM_OPERATORS,
    SORT,
    TURN_AND_WRITE,
    Pool,
)
from firstlight.ops.step_clock import Kind

_KINDS = {
    LINEAR: Kind.MATRICES,
    **dict.fromkeys((EXPERTS, CHOOSE, SORT, GATHER, COMBINE), Kind.EXPERTS),
    **dict.fromkeys((ATTEND, TURN_AND_WRITE, LATENT, BY_HEAD, HEADS), Kind.ATTENTION),
}


def kind_of(number: int) -> Kind:
    """What the library's operator of this number belongs to."""
    return _KINDS.get(number, Kind.OTHER)


class NativeOperatorTimes:
    """See `step_clock.OperatorTimes`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._words = (ctypes.c_uint64 * NUM_OPERATORS)()

    def start(self) -> None:
        self._pool.time(ctypes.addressof(self._words))

    def stop(self) -> None:
        self._pool.time(None)

    def take(self) -> list[tuple[Kind, int]]:
        taken = [
            (kind_of(number), nanoseconds) for number, nanoseconds in enumerate(self._words) if nanoseconds
        ]
        if taken:
            ctypes.memset(self._words, 0, ctypes.sizeof(self._words))
        return taken
