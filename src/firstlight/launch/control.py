"""What the launcher does next: a pure function of state, event and time.

`supervisor` feeds it what happened and carries out what it returns; tests feed it histories. Invariants: a
child that ends unasked ends the run; nothing is waited for without a deadline; the api process, which holds
the clients, is stopped before the ranks that serve them.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.launch.commands import API

PROBE_INTERVAL_S = 0.05
LEAVE_S = 8.0  # from SIGTERM to SIGKILL
DRAIN_MARGIN_S = 3.0  # on top of the api's own drain time


class Stage(enum.Enum):
    """Where a run is; `DRAINING` and later are its end."""

    STARTING = "starting"
    CHECKING = "checking"  # the engine is ready; the public port is asked whether it says so
    READY = "ready"
    DRAINING = "draining"  # the api ends; ranks still serve its open requests
    STOPPING = "stopping"  # everyone was told to end
    KILLING = "killing"
    ENDED = "ended"


class Death(msgspec.Struct, frozen=True):
    """The end of a child: when, how, its last words if it left any, and its last lines of output.

    `told`: we had asked it to end; filled in by `step`.
    """

    name: str
    time_s: float
    cause: ExitCause
    failure: Failure | None = None
    last_lines: tuple[str, ...] = ()
    told: bool = False


class EngineReady(msgspec.Struct, frozen=True):
    """Rank 0 generated its first token."""


class Probed(msgspec.Struct, frozen=True):
    """The public port was asked."""

    healthy: bool


class StopAsked(msgspec.Struct, frozen=True):
    """SIGINT, SIGTERM or SIGHUP came."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = EngineReady | Probed | StopAsked | Tick | Death


class Probe(msgspec.Struct, frozen=True):
    """Ask the public port whether it is healthy."""


class Announce(msgspec.Struct, frozen=True):
    """Say that the server is ready."""


class Terminate(msgspec.Struct, frozen=True):
    """Ask these children to end."""

    names: tuple[str, ...]


class Kill(msgspec.Struct, frozen=True):
    """End these children."""

    names: tuple[str, ...]


Action = Probe | Announce | Terminate | Kill


class LaunchState(msgspec.Struct, frozen=True):
    """Everything the decisions depend on. `asked`: a person wants it to end; `told`: children who know."""

    running: tuple[str, ...]
    drain_s: float
    stage: Stage = Stage.STARTING
    deadline_s: float = 0.0
    probe_at_s: float = 0.0
    asked: bool = False
    told: tuple[str, ...] = ()
    was_killed: bool = False
    deaths: tuple[Death, ...] = ()


Decision = tuple[LaunchState, list[Action]]
_LEAVING = (Stage.DRAINING, Stage.STOPPING, Stage.KILLING, Stage.ENDED)


def step(state: LaunchState, event: Event, now_s: float) -> Decision:
    """The next state, and what to do about the event."""
    match event:
        case EngineReady():
            return _on_engine_ready(state, now_s)
        case Probed(healthy=healthy):
            return _on_probed(state, healthy, now_s)
        case StopAsked():
            return _on_stop_asked(state, now_s)
        case Death():
            return _on_death(state, event, now_s)
        case Tick():
            return _on_tick(state, now_s)


def _on_engine_ready(state: LaunchState, now_s: float) -> Decision:
    if state.stage is not Stage.STARTING:
        return state, []
    return _with(state, stage=Stage.CHECKING, probe_at_s=now_s + PROBE_INTERVAL_S), [Probe()]


def _on_probed(state: LaunchState, healthy: bool, now_s: float) -> Decision:
    if state.stage is not Stage.CHECKING:
        return state, []
    if not healthy:
        return _with(state, probe_at_s=now_s + PROBE_INTERVAL_S), []
    return _with(state, stage=Stage.READY), [Announce()]


def _on_stop_asked(state: LaunchState, now_s: float) -> Decision:
    if state.stage in _LEAVING:  # asked again: the person will not wait
        return _kill(state)
    asked = _with(state, asked=True)
    if state.stage is Stage.READY and API in state.running:
        deadline_s = now_s + state.drain_s + DRAIN_MARGIN_S
        return _with(asked, stage=Stage.DRAINING, deadline_s=deadline_s, told=(API,)), [Terminate((API,))]
    return _stop(asked, now_s)


def _on_death(state: LaunchState, death: Death, now_s: float) -> Decision:
    running = tuple(name for name in state.running if name != death.name)
    death = msgspec.structs.replace(death, told=death.name in state.told)
    state = _with(state, running=running, deaths=(*state.deaths, death))
    if not running:
        return _with(state, stage=Stage.ENDED), []
    if state.stage in (Stage.STOPPING, Stage.KILLING):
        return state, []
    return _stop(state, now_s)


def _on_tick(state: LaunchState, now_s: float) -> Decision:
    if state.stage is Stage.CHECKING and now_s >= state.probe_at_s:
        return _with(state, probe_at_s=now_s + PROBE_INTERVAL_S), [Probe()]
    if state.stage not in _LEAVING or now_s < state.deadline_s:
        return state, []
    if state.stage is Stage.DRAINING:
        stopped, actions = _stop(state, now_s)
        return stopped, [*actions, Kill((API,))]
    return _kill(state) if state.stage is Stage.STOPPING else (state, [])


def _stop(state: LaunchState, now_s: float) -> Decision:
    stopping = _with(state, stage=Stage.STOPPING, deadline_s=now_s + LEAVE_S, told=_told(state))
    return stopping, [Terminate(state.running)]


def _kill(state: LaunchState) -> Decision:
    killing = _with(state, stage=Stage.KILLING, was_killed=True, told=_told(state))
    return killing, [Kill(state.running)]


def _told(state: LaunchState) -> tuple[str, ...]:
    return tuple({*state.told, *state.running})


def _with(state: LaunchState, **changes: Any) -> LaunchState:
    return msgspec.structs.replace(state, **changes)
