"""The loop of the supervisor: what happened, what to do about it, until nothing of the run is left.

Called by `launch.serve`. All decisions are in `control`, all effects in a `World`; this file only carries
between them. Invariant: it returns only when every child has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
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
