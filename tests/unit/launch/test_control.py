"""Named histories: events with their times go in, the actions that came out are compared."""

from __future__ import annotations

import msgspec
import pytest

from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.launch.control import (
    DIE_S,
    DRAIN_MARGIN_S,
    LAST_WORDS_S,
    LEAVE_S,
    SETTLE_S,
    LaunchState,
    OnStall,
    Stage,
    step,
)
from firstlight.launch.events import (
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
from firstlight.launch.verdict import verdict

CLEAN = ExitCause(0)
CRASH = ExitCause(1)
KILLED = ExitCause(None, 9)
TERMED = ExitCause(None, 15)


def play(
    *history: tuple[float, Event], ranks: int = 1, on_stall: OnStall = OnStall.REPORT
) -> tuple[LaunchState, list[Action]]:
    """Fold the history into a state and everything that was to be done."""
    names = (*(f"rank-{rank}" for rank in range(ranks)), "api")
    state = LaunchState(running=names, drain_s=10.0, on_stall=on_stall)
    done: list[Action] = []
    for time_s, event in history:
        state, actions = step(state, event, time_s)
        done += actions
    return state, done


def death(name: str, time_s: float, cause: ExitCause, failure: Failure | None = None) -> tuple[float, Death]:
    return time_s, Death(name, time_s, cause, failure)


READY = ((1.0, EngineReady()), (1.1, Probed(True)))


def test_ready_only_after_a_token_came_through_the_api() -> None:
    state, actions = play(
        (1.0, EngineReady()),
        (1.9, Tick()),
        (2.0, Probed(False)),
        (2.01, Tick()),
        (2.2, Tick()),
        (2.3, Probed(True)),
    )
    assert actions == [Probe(), Probe(), HandOver()]
    assert state.stage is Stage.READY


def test_the_port_is_handed_over_once() -> None:
    state, actions = play(*READY, (2.0, EngineReady()), (2.0, Probed(True)), (3.0, Tick()))
    assert actions == [Probe(), HandOver()]
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
    assert actions == [TakeBack(), Terminate(("api",))]
    assert verdict(state).exit_code == 3
    assert verdict(state).failure == failure


@pytest.mark.parametrize("on_stall", [OnStall.REPORT, OnStall.EXIT])
def test_a_rank_that_dies_while_serving_ends_the_run(on_stall: OnStall) -> None:
    history = (*READY, death("rank-0", 9.0, KILLED), (9.1, Tick()), (9.0 + LAST_WORDS_S, Tick()))
    state, actions = play(*history, on_stall=on_stall)
    assert actions[2:] == [Refuse(for_good=True), Terminate(("api",))]
    state, _ = step(state, death("api", 9.7, CLEAN)[1], 9.7)
    end = verdict(state)
    assert (state.stage, end.exit_code) == (Stage.ENDED, 6)
    assert end.failure is not None
    assert "rank 0 was ended by SIGKILL" in end.failure.message
    assert "--memory-fraction" in end.failure.hint


@pytest.mark.parametrize(
    ("is_oom", "said"),
    [(True, "The kernel ended it for want"), (False, "but not the kernel"), (None, "if it was the kernel")],
)
def test_who_killed_it_is_said_as_far_as_it_is_known(is_oom: bool | None, said: str) -> None:
    killed = msgspec.structs.replace(death("rank-0", 9.0, KILLED)[1], is_oom=is_oom)
    state, _ = play(*READY, (9.0, killed), on_stall=OnStall.EXIT)
    failure = verdict(state).failure
    assert failure is not None
    assert said in failure.hint


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
    state, _ = play(*READY, death("rank-0", 9.0, CLEAN), (9.5, StopAsked()), death("api", 9.6, CLEAN))
    assert state.stage is Stage.ENDED
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


STALL = Stalled(Failure("rank 1 is stopped.", "kill -CONT 12", 6), "rank-1")


def test_the_other_ranks_end_before_the_api_process_does() -> None:
    state, actions = play(*READY, death("rank-1", 9.0, KILLED), (9.9, Tick()), ranks=2)
    assert actions[2:] == [Refuse(for_good=True), Terminate(("rank-0",))]
    assert state.stage is Stage.LOST
    state, actions = step(state, Tick(), 9.0 + LEAVE_S + 0.1)
    assert actions == [Kill(("rank-0",))]
    state, _ = step(state, death("rank-0", 17.2, KILLED)[1], 17.2)
    state, actions = step(state, Tick(), 17.2)
    assert (state.stage, actions) == (Stage.STOPPING, [Terminate(("api",))])


def test_a_lost_api_process_gives_the_port_back_and_the_run_ends() -> None:
    state, actions = play(*READY, death("api", 9.0, KILLED))
    assert actions[2:] == [TakeBack(), Terminate(("rank-0",))]
    state, _ = step(state, death("rank-0", 9.2, CLEAN)[1], 9.2)
    state, _ = step(state, Tick(), 9.3)
    assert state.stage is Stage.LOST  # the front says why, to whoever asks in this moment
    state, _ = step(state, Tick(), 9.0 + LAST_WORDS_S)
    assert state.stage is Stage.ENDED
    assert verdict(state).exit_code == 6


def test_who_asks_for_the_end_of_a_lost_run_does_not_wait() -> None:
    state, actions = play(*READY, death("rank-0", 9.0, KILLED), (9.1, StopAsked()))
    assert actions[-1] == Terminate(("api",))
    assert verdict(state).exit_code == 6


def test_an_api_that_dies_after_its_engine_gives_the_port_back_too() -> None:
    _, actions = play(*READY, death("rank-0", 9.0, KILLED), death("api", 9.1, KILLED))
    assert actions[2:] == [Refuse(for_good=True), TakeBack()]


def test_a_death_among_those_who_stand_still_ends_the_run() -> None:
    state, actions = play(*READY, (20.0, STALL), death("rank-1", 21.0, KILLED), ranks=2)
    assert actions[2:] == [Refuse(), Refuse(for_good=True), Kill(("rank-0",))]
    assert state.stage is Stage.LOST


COMPLAINT = Failure("rank 1 lost rank 0.", "read the log of rank 0", 6)


def test_a_complaint_waits_for_the_news_of_whom_it_is_about() -> None:
    """Who left without a word is the cause, whoever is heard of first; clients are told once, and that."""
    history = (*READY, death("rank-1", 9.0, ExitCause(6), COMPLAINT))
    state, actions = play(*history, (9.1, Tick()), death("rank-0", 9.2, KILLED), ranks=2)
    assert actions[2:] == [Terminate(("rank-0",)), Refuse(for_good=True)]
    told = verdict(state)
    assert told.failure is not None
    assert "rank 0 was ended by SIGKILL" in told.failure.message
    state, _ = step(state, Tick(), 9.2 + LAST_WORDS_S)
    state, _ = step(state, death("api", 9.9, CLEAN)[1], 9.9)
    assert (state.stage, verdict(state)) == (Stage.ENDED, told)


def test_a_complaint_is_the_verdict_where_nothing_else_is_heard() -> None:
    history = (*READY, death("rank-1", 9.0, ExitCause(6), COMPLAINT), (9.0 + SETTLE_S, Tick()))
    state, actions = play(*history, (9.6, Tick()), death("rank-0", 9.7, TERMED), ranks=2)
    assert actions[2:] == [Terminate(("rank-0",)), Refuse(for_good=True)]
    assert verdict(state).failure == COMPLAINT
    _, actions = play(*history[:3], death("rank-0", 9.1, TERMED), ranks=2)
    assert actions[2:] == [Terminate(("rank-0",)), Refuse(for_good=True)]


def test_a_start_that_fails_is_told_on_the_port_with_its_cause() -> None:
    history = (death("rank-1", 2.0, ExitCause(6), COMPLAINT), (2.1, Tick()), death("rank-0", 2.2, KILLED))
    state, actions = play(*history, (2.3, Tick()), ranks=2)
    assert actions == [Terminate(("rank-0", "api")), TakeBack()]
    state, actions = play(history[0], (2.0 + SETTLE_S, Tick()), (2.6, Tick()), ranks=2)
    assert actions == [Terminate(("rank-0", "api")), TakeBack()]
    assert verdict(state).failure == COMPLAINT


def test_who_stops_a_start_is_not_told_of_it_as_of_a_failure() -> None:
    _, actions = play((1.0, StopAsked()), death("rank-0", 1.2, KILLED), (2.0, Tick()))
    assert actions == [Terminate(("rank-0", "api"))]


def test_a_death_after_a_stall_is_the_verdict_with_the_stall_before_it() -> None:
    state, _ = play(*READY, (20.0, STALL), death("rank-1", 21.0, KILLED), ranks=2)
    failure = verdict(state).failure
    assert failure is not None
    assert failure.message == ("rank 1 was ended by SIGKILL. Before that nothing moved: rank 1 is stopped.")


@pytest.mark.parametrize("on_stall", [OnStall.EXIT, OnStall.RESTART])
def test_a_stall_ends_open_requests_before_the_engine(on_stall: OnStall) -> None:
    state, actions = play(*READY, (20.0, STALL), ranks=2, on_stall=on_stall)
    assert actions[2:] == [Refuse(for_good=True), Kill(("rank-0", "rank-1"))]
    assert verdict(state).failure == STALL.failure


def test_a_stall_while_serving_refuses_requests_until_it_is_over() -> None:
    state, actions = play(*READY, (20.0, STALL), (21.0, STALL), ranks=2)
    assert actions[2:] == [Refuse()]
    assert state.stage is Stage.STALLED
    assert verdict(state).failure == STALL.failure
    state, actions = step(state, Recovered(), 30.0)
    assert (state.stage, actions) == (Stage.READY, [Accept()])


def test_who_stands_still_is_killed_when_the_server_is_stopped() -> None:
    state, actions = play(*READY, (20.0, STALL), (21.0, StopAsked()), ranks=2)
    assert actions[-1] == Kill(("rank-0", "rank-1", "api"))
    assert state.stage is Stage.KILLING


def test_an_api_process_that_stands_still_is_ended_before_the_port_is_taken_back() -> None:
    _, actions = play(*READY, (20.0, Stalled(Failure("the api process is stopped.", "", 6), "api")))
    assert actions[2:] == [TakeBack(), Kill(("rank-0",))]


@pytest.mark.parametrize("on_stall", list(OnStall))
def test_a_stall_while_starting_ends_the_start_with_its_verdict(on_stall: OnStall) -> None:
    state, actions = play((9.0, STALL), ranks=2, on_stall=on_stall)
    assert actions == [TakeBack(), Kill(("rank-0", "rank-1", "api"))]
    assert verdict(state).failure == STALL.failure
    assert state.wants_restart == (on_stall is OnStall.RESTART)


def test_a_person_who_wants_it_to_end_wins_over_a_restart() -> None:
    state, _ = play((9.0, STALL), (9.1, StopAsked()), ranks=2, on_stall=OnStall.RESTART)
    assert not state.wants_restart


def test_a_restart_answers_with_the_verdict_throughout_and_keeps_the_socket() -> None:
    history = (*READY, death("rank-0", 9.0, KILLED), (9.1, Tick()), (9.0 + LAST_WORDS_S, Tick()))
    state, actions = play(*history, on_stall=OnStall.RESTART)
    # It is not asked to end: at its own end it would close the socket for everybody.
    assert actions[2:] == [Refuse(for_good=True), TakeBack()]
    state, _ = step(state, death("api", 9.6, KILLED)[1], 9.6)
    assert state.stage is Stage.ENDED
    assert state.wants_restart


def test_who_cannot_be_killed_is_left_and_the_stall_stays_the_verdict() -> None:
    state = LaunchState(running=("rank-0", "api"), drain_s=5.0)
    failure = Failure("storage does not answer.", "Mount it again.", 6)
    state, _ = step(state, Stalled(failure, "rank-0", "storage-silent", "proved"), 1.0)
    state, _ = step(state, Death("api", 1.5, ExitCause(None, 9), None, ()), 1.5)
    state, _ = step(state, Tick(), 0.9 + DIE_S)
    assert state.stage is Stage.KILLING
    state, _ = step(state, Tick(), 1.1 + DIE_S)
    assert state.stage is Stage.ENDED
    assert verdict(state).failure == failure


def test_a_person_who_asked_is_not_kept_by_who_cannot_be_killed() -> None:
    state = LaunchState(running=("rank-0",), drain_s=5.0)
    state, _ = step(state, StopAsked(), 1.0)
    state, _ = step(state, StopAsked(), 2.0)
    state, _ = step(state, Tick(), 2.1 + DIE_S)
    assert state.stage is Stage.ENDED
    assert verdict(state).exit_code == 130
