"""Named histories: events with their times go in, the actions that came out are compared."""

from __future__ import annotations

import pytest

from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.launch.control import (
    DRAIN_MARGIN_S,
    LEAVE_S,
    Action,
    Announce,
    Death,
    EngineReady,
    Event,
    Kill,
    LaunchState,
    Probe,
    Probed,
    Stage,
    StopAsked,
    Terminate,
    Tick,
    step,
)
from firstlight.launch.verdict import verdict

CLEAN = ExitCause(0)
CRASH = ExitCause(1)
KILLED = ExitCause(None, 9)
TERMED = ExitCause(None, 15)


def play(*history: tuple[float, Event], ranks: int = 1) -> tuple[LaunchState, list[Action]]:
    """Fold the history into a state and everything that was to be done."""
    names = (*(f"rank-{rank}" for rank in range(ranks)), "api")
    state = LaunchState(running=names, drain_s=10.0)
    done: list[Action] = []
    for time_s, event in history:
        state, actions = step(state, event, time_s)
        done += actions
    return state, done


def death(name: str, time_s: float, cause: ExitCause, failure: Failure | None = None) -> tuple[float, Death]:
    return time_s, Death(name, time_s, cause, failure)


READY = ((1.0, EngineReady()), (1.1, Probed(True)))


def test_ready_only_after_the_public_port_says_so() -> None:
    state, actions = play(
        (1.0, EngineReady()), (1.0, Probed(False)), (1.01, Tick()), (1.2, Tick()), (1.2, Probed(True))
    )
    assert actions == [Probe(), Probe(), Announce()]
    assert state.stage is Stage.READY


def test_ready_is_announced_once() -> None:
    state, actions = play(*READY, (2.0, EngineReady()), (2.0, Probed(True)), (3.0, Tick()))
    assert actions == [Probe(), Announce()]
    assert state.stage is Stage.READY


def test_graceful_stop_ends_the_api_first_then_the_ranks() -> None:
    state, actions = play(*READY, (5.0, StopAsked()), death("api", 6.0, CLEAN), death("rank-0", 6.5, CLEAN))
    assert actions[2:] == [Terminate(("api",)), Terminate(("rank-0",))]
    assert state.stage is Stage.ENDED
    assert verdict(state).exit_code == 0


def test_stop_while_starting_ends_all_at_once() -> None:
    state, actions = play((0.5, StopAsked()), death("rank-0", 0.6, TERMED), death("api", 0.7, TERMED))
    assert actions == [Terminate(("rank-0", "api"))]
    assert verdict(state).exit_code == 0


def test_an_api_that_does_not_drain_is_killed_after_its_time() -> None:
    late = 5.0 + 10.0 + DRAIN_MARGIN_S + 0.1
    state, actions = play(*READY, (5.0, StopAsked()), (14.9, Tick()), (late, Tick()))
    assert actions[2:] == [Terminate(("api",)), Terminate(("rank-0", "api")), Kill(("api",))]
    assert state.stage is Stage.STOPPING


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    history = (*READY, (5.0, StopAsked()), death("api", 5.1, CLEAN), (5.1 + LEAVE_S + 0.1, Tick()))
    state, actions = play(*history)
    assert actions[-1] == Kill(("rank-0",))
    state, _ = step(state, death("rank-0", 14.0, KILLED)[1], 14.0)
    assert verdict(state).exit_code == 130


def test_a_second_interrupt_kills() -> None:
    state, actions = play(*READY, (5.0, StopAsked()), (5.2, StopAsked()))
    assert actions[-1] == Kill(("rank-0", "api"))
    assert state.stage is Stage.KILLING


def test_a_rank_that_fails_takes_the_run_down_with_its_own_exit_code() -> None:
    failure = Failure("model.gguf is cut short", "fetch it again", 3)
    state, actions = play(death("rank-0", 2.0, ExitCause(3), failure), death("api", 2.2, TERMED))
    assert actions == [Terminate(("api",))]
    assert verdict(state).exit_code == 3
    assert verdict(state).failure == failure


def test_a_rank_that_dies_while_serving_ends_the_run_with_an_error() -> None:
    state, actions = play(*READY, death("rank-0", 9.0, KILLED), death("api", 9.1, CLEAN))
    end = verdict(state)
    assert actions[2:] == [Terminate(("api",))]
    assert end.exit_code == 6
    assert end.failure is not None
    assert "rank 0 was ended by SIGKILL" in end.failure.message
    assert "--memory-fraction" in end.failure.hint


def test_the_cause_wins_over_the_complaint_of_the_rank_that_lost_it() -> None:
    complaint = Failure("collective 17 timed out", "", 6)
    state, _ = play(
        death("rank-1", 3.0, ExitCause(6), complaint),
        death("rank-0", 3.1, ExitCause(3), Failure("bad shard", "", 3)),
        death("api", 3.2, TERMED),
        ranks=2,
    )
    assert verdict(state).failure == Failure("bad shard", "", 3)


def test_those_we_killed_are_not_the_cause() -> None:
    state, _ = play(
        death("rank-1", 3.0, CRASH),
        (3.0 + LEAVE_S + 0.1, Tick()),
        death("rank-0", 11.5, KILLED),
        death("api", 11.6, KILLED),
        ranks=2,
    )
    end = verdict(state)
    assert end.death is not None
    assert end.death.name == "rank-1"
    assert end.exit_code == 6


def test_a_crash_during_the_drain_is_not_hidden() -> None:
    state, actions = play(
        *READY, (5.0, StopAsked()), death("rank-0", 5.5, ExitCause(None, 11)), death("api", 6.0, CLEAN)
    )
    assert actions[2:] == [Terminate(("api",)), Terminate(("api",))]
    assert verdict(state).exit_code == 6


def test_a_clean_end_that_nobody_asked_for_is_an_error() -> None:
    state, _ = play(*READY, death("rank-0", 9.0, CLEAN), death("api", 9.1, CLEAN))
    end = verdict(state)
    assert end.exit_code == 6
    assert end.failure is not None
    assert "exit code 0" in end.failure.message


@pytest.mark.parametrize("late", [EngineReady(), Probed(True), Tick()])
def test_nothing_restarts_a_run_that_is_ending(late: Event) -> None:
    state, actions = play((0.5, StopAsked()), (0.6, late))
    assert actions == [Terminate(("rank-0", "api"))]
    assert state.stage is Stage.STOPPING


def test_the_last_line_of_output_explains_a_crash_without_last_words() -> None:
    lines = ("Traceback (most recent call last):", "  File x", "ImportError: no module named zmq", "")
    state, _ = step(LaunchState(running=("api",), drain_s=1.0), Death("api", 1.0, CRASH, None, lines), 1.0)
    end = verdict(state)
    assert end.failure is not None
    assert end.failure.message == "the api process ended with exit code 1: ImportError: no module named zmq"
