"""The loop of the supervisor: what happened, what to do about it, until nothing of the run is left.

All decisions are in `control`, all effects in a `World`; this file only carries between them. Invariant: it
returns only when every child has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from firstlight.base.clock import Clock
from firstlight.launch.control import LaunchState, Stage, step
from firstlight.launch.events import (
    Accept,
    Action,
    Event,
    HandOver,
    Kill,
    Probe,
    Refuse,
    TakeBack,
    Terminate,
    Tick,
)
from firstlight.launch.verdict import Verdict, verdict

MOST = 5
WINDOW_S = 600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_TURN_S = 0.25


class World(Protocol):
    """Everything outside: children, clients, the person at the terminal."""

    def wait(self, stage: Stage) -> Sequence[Event]:
        """What happened, at the latest after a fraction of a second."""
        ...

    def terminate(self, names: Sequence[str]) -> None: ...

    def kill(self, names: Sequence[str]) -> None: ...

    def probe(self) -> None:
        """Ask for a token; `Probed` follows."""
        ...

    def hand_over(self) -> None: ...

    def take_back(self, end: Verdict) -> None: ...

    def refuse(self, end: Verdict, *, for_good: bool) -> None: ...

    def accept(self) -> None: ...


def supervise(state: LaunchState, world: World, clock: Clock) -> LaunchState:
    """Run until every child has ended; the final state says how each one did."""
    while state.stage is not Stage.ENDED:
        events: list[Event] = [*world.wait(state.stage), Tick()]
        while events:
            state, actions = step(state, events.pop(0), clock.now_s())
            for action in actions:
                _carry_out(action, state, world)
    return state


def _carry_out(action: Action, state: LaunchState, world: World) -> None:
    match action:
        case Probe():
            world.probe()
        case HandOver():
            world.hand_over()
        case TakeBack():
            world.take_back(verdict(state))
        case Refuse(for_good=for_good):
            world.refuse(verdict(state), for_good=for_good)
        case Accept():
            world.accept()
        case Terminate(names=names):
            world.terminate(names)
        case Kill(names=names):
            world.kill(names)


# How often an engine that was lost is started again, and after what pause: `--on-stall restart`. An engine
# that fails at once, again and again, ends the server within a few minutes instead of burning the machine
# for ever.


class RestartLimit:
    """At most five restarts in ten minutes, the pause between them doubled each time."""

    most = MOST

    def __init__(self) -> None:
        self._restarts_s: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts of the last ten minutes."""
        return len(self._restarts_s)

    @property
    def pause_s(self) -> float:
        """How long to wait before the one that was allowed."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.count - 1))

    def allows_another(self, now_s: float) -> bool:
        """Count a restart if there is one left."""
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()
        if self.count >= MOST:
            return False
        self._restarts_s.append(now_s)
        return True

    def wait(self, turn: Callable[[], None]) -> None:
        """The pause, with a `turn` every now and then; a signal that ends the program ends it too."""
        end_s = time.monotonic() + self.pause_s
        while (left_s := end_s - time.monotonic()) > 0:
            turn()
            time.sleep(min(left_s, _TURN_S))
