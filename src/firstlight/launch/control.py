"""What the supervisor does next: a pure function of state, event and time.

`supervisor` feeds it what happened and carries out what it returns; tests feed it histories. Invariants:
nothing is waited for without a deadline; whoever asks on the public port gets an answer at every moment, from
the api process or from the front; the api process, which holds the clients, is stopped before the ranks.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.launch.commands import API

PROBE_INTERVAL_S = 0.05
LEAVE_S = 8.0  # from SIGTERM to SIGKILL
DRAIN_MARGIN_S = 3.0  # on top of the api's own drain time
LAST_WORDS_S = 0.5  # for open requests to end with the verdict, and for who asks in that moment to get it


class Stage(enum.Enum):
    """Where a run is; `DRAINING` and later are its end."""

    STARTING = "starting"
    CHECKING = "checking"  # the engine is ready; a token is asked for through the api process
    READY = "ready"
    STALLED = "stalled"  # everyone lives, nothing moves; requests are refused with the verdict
    LOST = "lost"  # a process died: requests end with the verdict, what is left of the engine ends, then all
    DRAINING = "draining"  # the api ends; ranks still serve its open requests
    STOPPING = "stopping"  # everyone was told to end
    KILLING = "killing"
    ENDED = "ended"


class OnStall(enum.Enum):
    """`--on-stall`: what to do about an engine that stands still. One that died is ended or restarted."""

    REPORT = "report"
    RESTART = "restart"
    EXIT = "exit"


class Death(msgspec.Struct, frozen=True):
    """The end of a child: when, how, its last words if it left any, and its last lines of output.

    `is_oom`: the kernel ended it for want of memory; None: not known. `told`: we had asked it to end, or it
    left in peace when the run was asked to; filled in by `step`.
    """

    name: str
    time_s: float
    cause: ExitCause
    failure: Failure | None = None
    last_lines: tuple[str, ...] = ()
    told: bool = False
    is_oom: bool | None = None


class EngineReady(msgspec.Struct, frozen=True):
    """Rank 0 generated its first token."""


class Probed(msgspec.Struct, frozen=True):
    """A token was asked for through the api process."""

    healthy: bool


class StopAsked(msgspec.Struct, frozen=True):
    """SIGINT, SIGTERM or SIGHUP came, or `firstlight stop`."""


class Stalled(msgspec.Struct, frozen=True):
    """Nothing moves although there is work: the verdict on it, and who is to blame if that is known."""

    failure: Failure
    name: str = ""


class Recovered(msgspec.Struct, frozen=True):
    """What stood still moves again."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = EngineReady | Probed | StopAsked | Stalled | Recovered | Tick | Death


class Probe(msgspec.Struct, frozen=True):
    """Ask for a token through the api process."""


class HandOver(msgspec.Struct, frozen=True):
    """The front stops to accept and the api process begins; say that the server is ready."""


class TakeBack(msgspec.Struct, frozen=True):
    """The api process ends at once, and the front answers with the verdict."""


class Refuse(msgspec.Struct, frozen=True):
    """The api process ends its open requests and refuses new ones with the verdict.

    `for_good`: the engine is lost and does not come back.
    """

    for_good: bool = False


class Accept(msgspec.Struct, frozen=True):
    """The verdict is withdrawn: the api process takes requests again."""


class Terminate(msgspec.Struct, frozen=True):
    """Ask these children to end."""

    names: tuple[str, ...]


class Kill(msgspec.Struct, frozen=True):
    """End these children."""

    names: tuple[str, ...]


Action = Probe | HandOver | TakeBack | Refuse | Accept | Terminate | Kill


class LaunchState(msgspec.Struct, frozen=True):
    """Everything the decisions depend on. `asked`: a person wants it to end; `told`: children who know.

    `lost_until_s`: when a lost engine has been spoken of for long enough.
    """

    running: tuple[str, ...]
    drain_s: float
    on_stall: OnStall = OnStall.REPORT
    stage: Stage = Stage.STARTING
    deadline_s: float = 0.0
    probe_at_s: float = 0.0
    lost_until_s: float = 0.0
    asked: bool = False
    told: tuple[str, ...] = ()
    was_killed: bool = False
    was_ready: bool = False
    deaths: tuple[Death, ...] = ()
    stall: Stalled | None = None

    @property
    def wants_restart(self) -> bool:
        """Whether an engine that was lost shall be started again."""
        return self.on_stall is OnStall.RESTART and not self.asked


Decision = tuple[LaunchState, list[Action]]
_LEAVING = (Stage.DRAINING, Stage.STOPPING, Stage.KILLING, Stage.ENDED)
_SERVING = (Stage.READY, Stage.STALLED)


def step(state: LaunchState, event: Event, now_s: float) -> Decision:
    """The next state, and what to do about the event."""
    match event:
        case EngineReady():
            return _on_engine_ready(state, now_s)
        case Probed(healthy=healthy):
            return _on_probed(state, healthy, now_s)
        case StopAsked():
            return _on_stop_asked(state, now_s)
        case Stalled():
            return _on_stalled(state, event, now_s)
        case Recovered():
            return _on_recovered(state)
        case Death():
            return _on_death(state, event, now_s)
        case Tick():
            return _on_tick(state, now_s)


def _on_engine_ready(state: LaunchState, now_s: float) -> Decision:
    if state.stage is not Stage.STARTING:
        return state, []
    return _with(state, stage=Stage.CHECKING, probe_at_s=math.inf), [Probe()]


def _on_probed(state: LaunchState, healthy: bool, now_s: float) -> Decision:
    if state.stage is not Stage.CHECKING:
        return state, []
    if not healthy:
        return _with(state, probe_at_s=now_s + PROBE_INTERVAL_S), []
    return _with(state, stage=Stage.READY, was_ready=True), [HandOver()]


def _on_stop_asked(state: LaunchState, now_s: float) -> Decision:
    asked = _with(state, asked=True)
    if state.stage in _LEAVING:  # asked again: the person will not wait
        return _kill(asked)
    if not state.running:
        return _with(asked, stage=Stage.ENDED), []
    if state.stage is Stage.READY and API in state.running:
        deadline_s = now_s + state.drain_s + DRAIN_MARGIN_S
        return _with(asked, stage=Stage.DRAINING, deadline_s=deadline_s, told=(API,)), [Terminate((API,))]
    if state.stage is Stage.STALLED:  # who does not move does not leave when asked
        return _kill(asked)
    return _stop(asked, now_s)


def _on_stalled(state: LaunchState, stalled: Stalled, now_s: float) -> Decision:
    if state.stage in _LEAVING or state.stage in (Stage.LOST, Stage.STALLED):
        return state, []
    state = _with(state, stall=stalled)
    if state.stage is not Stage.READY:
        killed, actions = _kill(state)
        return killed, [TakeBack(), *actions]
    if stalled.name != API and state.on_stall is OnStall.REPORT:
        return _with(state, stage=Stage.STALLED), [Refuse()]
    return _lose(state, now_s, without_api=stalled.name == API)


def _on_recovered(state: LaunchState) -> Decision:
    if state.stage is not Stage.STALLED:
        return state, []
    return _with(state, stage=Stage.READY, stall=None), [Accept()]


def _on_death(state: LaunchState, death: Death, now_s: float) -> Decision:
    running = tuple(name for name in state.running if name != death.name)
    was_told = death.name in state.told or (state.asked and death.cause.code == 0)
    death = msgspec.structs.replace(death, told=was_told)
    state = _with(state, running=running, deaths=(*state.deaths, death))
    if state.stage in _SERVING:
        return _lose(state, now_s, without_api=death.name == API)
    if state.stage is Stage.LOST:
        return state, [TakeBack()] if death.name == API else []
    if not running:
        return _with(state, stage=Stage.ENDED), []
    return (state, []) if state.stage in (Stage.STOPPING, Stage.KILLING) else _stop(state, now_s)


def _lose(state: LaunchState, now_s: float, *, without_api: bool) -> Decision:
    """The engine is lost: its ranks end; the api process, or else the front, says why to whoever asks."""
    ranks = tuple(name for name in state.running if name != API)
    told = tuple({*state.told, *ranks, *((API,) if without_api else ())})
    until_s = now_s + LAST_WORDS_S
    lost = _with(state, stage=Stage.LOST, deadline_s=now_s + LEAVE_S, lost_until_s=until_s, told=told)
    first: Action = TakeBack() if without_api else Refuse(for_good=True)
    # Who stands still does not leave when asked.
    end: Action = Kill(ranks) if state.stall is not None else Terminate(ranks)
    return lost, [first, end] if ranks else [first]


def _on_tick(state: LaunchState, now_s: float) -> Decision:
    if state.stage is Stage.CHECKING and now_s >= state.probe_at_s:
        return _with(state, probe_at_s=math.inf), [Probe()]  # the next one when its answer has come
    if state.stage is Stage.LOST:
        return _on_tick_while_lost(state, now_s)
    if state.stage not in _LEAVING or now_s < state.deadline_s:
        return state, []
    if state.stage is Stage.DRAINING:
        stopped, actions = _stop(state, now_s)
        return stopped, [*actions, Kill((API,))]
    return _kill(state) if state.stage is Stage.STOPPING else (state, [])


def _on_tick_while_lost(state: LaunchState, now_s: float) -> Decision:
    """First the ranks end, then the api process; before a restart by force, as it would close the socket."""
    ranks = tuple(name for name in state.running if name != API)
    if ranks:
        is_late = now_s >= state.deadline_s
        return (_with(state, deadline_s=now_s + LEAVE_S), [Kill(ranks)]) if is_late else (state, [])
    if now_s < state.lost_until_s:
        return state, []
    if not state.running:
        return _with(state, stage=Stage.ENDED), []
    if state.wants_restart:
        killing, _ = _kill(state)
        return killing, [TakeBack()]
    return _stop(state, now_s)


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
