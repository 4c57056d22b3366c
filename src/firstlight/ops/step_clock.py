"""Where the time of a step goes: every nanosecond of a rank belongs to one kind of work.

A `Group` has one for its rank. Layers, collectives and the engine's step run their work through it, and
`engine.worker.profile` turns it on while a profile is made. Invariant: the kinds of a turn add up to its
time, because one begins where another ends; off, it reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from time import monotonic_ns
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Kind(IntEnum):
    """What a rank does at a moment. Within another kind only collectives and waiting count by themselves."""

    PYTHON = 0  # whatever no operator does: the scheduler, messages, layers' own code
    MATRICES = 1
    ATTENTION = 2  # norms, turns and products of its heads included, and the writing of KV
    EXPERTS = 3  # their router and their products; shared experts are matrices
    COLLECTIVES = 4  # waiting for the other ranks in them included
    SAMPLING = 5
    DRAFTING = 6  # all that a drafter does, its own products too
    OTHER = 7  # operators: norms, gates, embedding
    WAITING = 8  # for a plan from rank 0, or for requests


WORDS = {
    Kind.MATRICES: "matrix products",
    Kind.ATTENTION: "attention",
    Kind.EXPERTS: "experts",
    Kind.COLLECTIVES: "collectives",
    Kind.SAMPLING: "sampling",
    Kind.DRAFTING: "drafting",
    Kind.OTHER: "other operators",
    Kind.PYTHON: "Python",
    Kind.WAITING: "waiting",
}
_OWN = (Kind.COLLECTIVES, Kind.WAITING)


class OperatorTimes(Protocol):
    """Operators that time themselves, many in one call."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def take(self) -> Iterable[tuple[Kind, int]]:
        """Nanoseconds of each kind since the last call."""
        ...


class StepClock:
    """See the module. `operators`: where many run in one call, who times them."""

    def __init__(self) -> None:
        self.is_on = False
        self.operators: OperatorTimes | None = None
        self._kind = Kind.PYTHON
        self._since_ns = self._began_ns = 0
        self._spent_ns = [0] * len(Kind)

    def run(self, kind: Kind, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls the function, whose time belongs to `kind`."""
        before = self._kind
        if not self.is_on or (before and kind not in _OWN):
            return function(*arguments, **named)
        self._begin(kind)
        try:
            return function(*arguments, **named)
        finally:
            self._begin(before)

    def turn(self, *, on: bool) -> tuple[list[int], int]:
        """Ends a turn, and begins the next one with the clock on or off.

        Nanoseconds of each kind, all 0 where it was off, and of the whole turn by a look of its own.
        """
        ended_ns = self._end() if self.is_on else monotonic_ns()
        if on != self.is_on and self.operators is not None:
            (self.operators.start if on else self.operators.stop)()
        self.is_on = on
        spent_ns, self._spent_ns = self._spent_ns, [0] * len(Kind)
        began_ns, self._began_ns, self._since_ns = self._began_ns, ended_ns, ended_ns
        return spent_ns, ended_ns - began_ns

    def _end(self) -> int:
        """Ends the last kind of a turn; when that was."""
        ended_ns = monotonic_ns()
        self._begin(Kind.PYTHON)
        return ended_ns

    def _begin(self, kind: Kind) -> None:
        now_ns = monotonic_ns()
        spent_ns, self._since_ns = now_ns - self._since_ns, now_ns
        if self.operators is not None:
            # Called one by one they belong to what called them; a program of them is told apart.
            for of_kind, nanoseconds in self.operators.take():
                if self._kind == Kind.PYTHON:
                    self._spent_ns[of_kind] += nanoseconds
                    spent_ns -= nanoseconds
        self._spent_ns[self._kind] += spent_ns
        self._kind = kind
