"""The loop of the launcher: what happened, what to do about it, until nothing of the run is left.

Called by `launch.serve`. All decisions are in `control`, all effects in a `World`; this file only carries
between them. Invariant: it returns only when every child has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from firstlight.base.clock import Clock
from firstlight.launch.control import (
    Action,
    Announce,
    Event,
    Kill,
    LaunchState,
    Probe,
    Probed,
    Stage,
    Terminate,
    Tick,
    step,
)


class World(Protocol):
    """Everything outside: children, clients, the person at the terminal."""

    def wait(self, *, is_serving: bool) -> Sequence[Event]:
        """What happened, at the latest after a fraction of a second."""
        ...

    def terminate(self, names: Sequence[str]) -> None: ...

    def kill(self, names: Sequence[str]) -> None: ...

    def probe(self) -> bool: ...

    def announce(self) -> None: ...


def supervise(state: LaunchState, world: World, clock: Clock) -> LaunchState:
    """Run until every child has ended; the final state says how each one did."""
    while state.stage is not Stage.ENDED:
        is_serving = state.stage is Stage.READY
        events: list[Event] = [*world.wait(is_serving=is_serving), Tick()]
        while events:
            state, actions = step(state, events.pop(0), clock.now_s())
            for action in actions:
                events.extend(_carry_out(action, world))
    return state


def _carry_out(action: Action, world: World) -> list[Event]:
    match action:
        case Probe():
            return [Probed(world.probe())]
        case Announce():
            world.announce()
        case Terminate(names=names):
            world.terminate(names)
        case Kill(names=names):
            world.kill(names)
    return []
