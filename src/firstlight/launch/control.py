"""What the supervisor does next: a pure function of state, event and time.

`supervisor` feeds it what happened and carries out what it returns; tests feed it histories. Invariants:
nothing is waited for without a deadline; whoever asks on the public port gets an answer at every moment, from
the api process or from the front; the api process, which holds the clients, is stopped before the ranks.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from firstlight.launch.events import (
    FAILURE_CODES,
    Accept,
    Action,
    Death,
    EngineReady,
    Event,
    HandOver,
    Kill,
    Probe,
    Probed,
    Recovered,
    Refuse,
    Stalled,
    StopAsked,
    TakeBack,
    Terminate,
    Tick,
)
from firstlight.launch.processes.commands import API

PROBE_INTERVAL_S = 0.05
LEAVE_S = 8.0  # from SIGTERM to SIGKILL
DRAIN_MARGIN_S = 3.0  # on top of the api's own drain time
DIE_S = 10.0  # from SIGKILL to giving up a process that the kernel does not let go
LAST_WORDS_S = 0.5  # for open requests to end with the verdict, and for who asks in that moment to get it
SETTLE_S = 0.5  # from a rank's complaint that another one is gone to the news of what became of that one


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


class LaunchState(msgspec.Struct, frozen=True):
    """Everything the decisions depend on. `asked`: a person wants it to end; `told`: children who know.

    `killed`: children whom we have killed. `is_spoken`: whether clients know why the engine is lost;
    `word_s`: until when that waits for a better reason, and then until when it is told.
    """

    running: tuple[str, ...]
    drain_s: float
    on_stall: OnStall = OnStall.REPORT
    stage: Stage = Stage.STARTING
    deadline_s: float = 0.0
    probe_at_s: float = 0.0
    word_s: float = 0.0
    is_spoken: bool = False
    asked: bool = False
    told: tuple[str, ...] = ()
    killed: tuple[str, ...] = ()
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
        return _kill(asked, now_s)
    if not state.running:
        return _with(asked, stage=Stage.ENDED), []
    if state.stage is Stage.READY and API in state.running:
        deadline_s = now_s + state.drain_s + DRAIN_MARGIN_S
        return _with(asked, stage=Stage.DRAINING, deadline_s=deadline_s, told=(API,)), [Terminate((API,))]
    if state.stage is Stage.STALLED:  # who does not move does not leave when asked
        return _kill(asked, now_s)
    return _stop(asked, now_s)


def _on_stalled(state: LaunchState, stalled: Stalled, now_s: float) -> Decision:
    if state.stage in _LEAVING or state.stage in (Stage.LOST, Stage.STALLED):
        return state, []
    state = _with(state, stall=stalled)
    if state.stage is not Stage.READY:
        killed, actions = _kill(_with(state, is_spoken=True), now_s)
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
    death = msgspec.structs.replace(death, told=_was_told(state, death))
    state = _with(state, running=running, deaths=(*state.deaths, death))
    is_clear = not death.told and _is_clear(state, death)
    if state.stage in _SERVING:
        return _lose(state, now_s, without_api=death.name == API, is_clear=is_clear)
    if state.stage is Stage.LOST:
        return _on_death_while_lost(state, death, now_s, is_clear=is_clear)
    if not running:
        return _with(state, stage=Stage.ENDED), []
    if state.stage in (Stage.STOPPING, Stage.KILLING):
        return _speak(state, now_s) if is_clear else (state, [])
    stopping, actions = _stop(_with(state, word_s=now_s + SETTLE_S), now_s)
    spoken, words = _speak(stopping, now_s) if is_clear else (stopping, [])
    return spoken, [*words, *actions]


def _was_told(state: LaunchState, death: Death) -> bool:
    """Whether we are why it ended. Who was asked to leave and dies by a SIGKILL that is not ours had another
    reason, unless all was to end: then nobody cares.
    """
    if state.asked and death.cause.code == 0:
        return True
    is_foreign = death.cause.signal == signal.SIGKILL and death.name not in state.killed
    return death.name in state.told and (state.asked or not is_foreign)


def _is_clear(state: LaunchState, death: Death) -> bool:
    """Whether it is not just a rank's complaint about another one, of which we have still to hear."""
    is_complaint = death.failure is not None and death.failure.exit_code in FAILURE_CODES
    return not (is_complaint and _ranks(state))


def _lose(state: LaunchState, now_s: float, *, without_api: bool, is_clear: bool = True) -> Decision:
    """The engine is lost: its ranks end; the api process, or else the front, says why to whoever asks."""
    ranks = _ranks(state)
    told = tuple({*state.told, *ranks, *((API,) if without_api else ())})
    lost = _with(state, stage=Stage.LOST, deadline_s=now_s + LEAVE_S, word_s=now_s + SETTLE_S, told=told)
    # An api process that stands still is alive, but nobody will hear it.
    lost, words = _speak(lost, now_s, without_api=without_api) if is_clear else (lost, [])
    if not ranks:
        return lost, words
    if state.stall is None:
        return lost, [*words, Terminate(ranks)]
    return _with_killed(lost, ranks), [*words, Kill(ranks)]  # who stands still does not leave when asked


def _speak(state: LaunchState, now_s: float, *, without_api: bool = False) -> Decision:
    """Tell clients why the engine is lost, once, and not those of a person who wanted it to end."""
    if state.is_spoken or state.asked:
        return state, []
    spoken = _with(state, is_spoken=True, word_s=now_s + LAST_WORDS_S)
    if state.was_ready and API in state.running and not without_api:
        return spoken, [Refuse(for_good=True)]
    return _with_killed(spoken, (API,)), [TakeBack()]


def _on_death_while_lost(state: LaunchState, death: Death, now_s: float, *, is_clear: bool) -> Decision:
    if death.name == API and state.is_spoken:
        return state, [TakeBack()]
    return _speak(state, now_s) if is_clear or not _ranks(state) else (state, [])


def _on_tick(state: LaunchState, now_s: float) -> Decision:
    if state.stage is Stage.CHECKING and now_s >= state.probe_at_s:
        return _with(state, probe_at_s=math.inf), [Probe()]  # the next one when its answer has come
    if state.stage is Stage.LOST:
        return _on_tick_while_lost(state, now_s)
    if state.stage not in _LEAVING:
        return state, []
    if now_s < state.deadline_s:
        is_due = state.stage is Stage.STOPPING and state.deaths and now_s >= state.word_s
        return _speak(state, now_s) if is_due else (state, [])
    if state.stage is Stage.DRAINING:
        stopped, actions = _stop(_with_killed(state, (API,)), now_s)
        return stopped, [*actions, Kill((API,))]
    if state.stage is Stage.KILLING:  # what is left waits in the kernel, for good
        return _with(state, stage=Stage.ENDED), []
    return _kill(state, now_s) if state.stage is Stage.STOPPING else (state, [])


def _on_tick_while_lost(state: LaunchState, now_s: float) -> Decision:
    """First the ranks end, then the api process; before a restart by force, as it would close the socket."""
    if not state.is_spoken and now_s >= state.word_s:
        return _speak(state, now_s)
    ranks = _ranks(state)
    if ranks and now_s >= state.deadline_s:
        return _with_killed(_with(state, deadline_s=now_s + LEAVE_S), ranks), [Kill(ranks)]
    if ranks or now_s < state.word_s:
        return state, []
    if not state.running:
        return _with(state, stage=Stage.ENDED), []
    if state.wants_restart:
        killing, _ = _kill(state, now_s)
        return killing, [TakeBack()]
    return _stop(state, now_s)


def _stop(state: LaunchState, now_s: float) -> Decision:
    stopping = _with(state, stage=Stage.STOPPING, deadline_s=now_s + LEAVE_S, told=_told(state))
    return stopping, [Terminate(state.running)]


def _kill(state: LaunchState, now_s: float) -> Decision:
    killing = _with(
        _with_killed(state, state.running),
        stage=Stage.KILLING,
        deadline_s=now_s + DIE_S,
        was_killed=True,
        told=_told(state),
    )
    return killing, [Kill(state.running)]


def _ranks(state: LaunchState) -> tuple[str, ...]:
    return tuple(name for name in state.running if name != API)


def _with_killed(state: LaunchState, names: Sequence[str]) -> LaunchState:
    return _with(state, killed=tuple({*state.killed, *names}))


def _told(state: LaunchState) -> tuple[str, ...]:
    return tuple({*state.told, *state.running})


def _with(state: LaunchState, **changes: Any) -> LaunchState:
    return msgspec.structs.replace(state, **changes)
