"""What a run tells of itself, from its directory alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.base.blackbox.store import box_path, make_box_folder
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection, write_config
from firstlight.base.errors import EngineError, UsageError
from firstlight.base.exit_notes import ExitNote, write_exit_note
from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.base.run_verdict import last_run_verdict
from firstlight.cli.ps import table
from firstlight.launch.events import Death, Stalled
from firstlight.launch.processes.doctor_socket import DoctorSocket
from firstlight.launch.runs import stop
from firstlight.launch.runs.logs import keep_verdict, withdraw_verdict
from firstlight.launch.runs.run_directory import RunDirectory, make_run_directory
from firstlight.launch.runs.run_record import RunRecord
from firstlight.launch.runs.runs import ProcessView, find_run, list_runs, status_of
from firstlight.launch.runs.stop import stop_run
from firstlight.launch.verdict import Verdict


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run of this process."""
    monkeypatch.setattr("firstlight.launch.runs.run_directory._parents", lambda: [tmp_path])
    monkeypatch.setattr("firstlight.launch.runs.run_directory._fits", lambda parent: True)
    made = make_run_directory()
    yield made
    made.close(keep_logs=False)


def fill(run: RunDirectory) -> None:
    server = ServerSection(port=9000)
    model = ModelSection(path="m", served_names=("tiny",))
    write_config(RunConfig(run_dir=str(run.path), model=model, engine=EngineSection(), server=server))
    make_box_folder(run.path, shared_memory=run.path / "absent")
    path = box_path(run.path, "rank-0")
    create_box(path, role="rank", rank=0, run_id=run.path.name)
    box = BlackBox(path)
    box.claim()
    box.enter_phase("weights", 200, "bytes")
    box.advance(50)
    box.close()
    create_box(box_path(run.path, "api"), role="api", rank=None, run_id=run.path.name)


def note(name: str, *, told: bool) -> ExitNote:
    return ExitNote(name=name, pid=1, code=None, signal=9, told=told, time_s=0.0, is_oom=None)


def test_a_run_and_its_processes(run: RunDirectory) -> None:
    fill(run)
    (shown,) = list_runs()
    assert (shown.pid, shown.status, shown.model) == (os.getpid(), "starting", "tiny")
    assert shown.url == "http://127.0.0.1:9000"
    api, rank = shown.processes
    assert (rank.pid, rank.rank, rank.phase, rank.percent) == (os.getpid(), 0, "weights", 25.0)
    assert rank.is_alive
    assert (api.role, api.pid, api.phase) == ("api", None, None)
    rows = table([shown])
    assert rows[1].split() == [
        str(run.path), str(os.getpid()), "starting", "tiny", "http://127.0.0.1:9000",
    ]  # fmt: skip
    assert rows[3].split() == ["rank-0", str(os.getpid()), "alive", "weights", "25", "%", "rank", "0"]


def test_a_run_that_stands_still_says_why(run: RunDirectory) -> None:
    fill(run)
    failure = Failure("rank 0 (pid 7) is stopped.", "let it go on", 6)
    stalled = Verdict(6, failure, stall=Stalled(failure, "rank-0"))
    socket = DoctorSocket(run.path, lambda: stalled)
    try:
        (shown,) = list_runs()
        assert (shown.status, shown.verdict) == ("stuck", "rank 0 (pid 7) is stopped.")
        assert table([shown])[-1] == f"{run.path} is stuck: rank 0 (pid 7) is stopped."
    finally:
        socket.close()
    (shown,) = list_runs()
    assert (shown.status, shown.verdict) == ("starting", "")


@pytest.mark.usefixtures("run")
def test_the_verdict_of_a_run_that_has_ended_is_in_its_record() -> None:
    run = make_run_directory()
    fill(run)
    killed = Failure("rank 0 was ended by SIGKILL.", "find out who did", 6)
    keep_verdict(run.path, Verdict(6, killed, Death("rank-0", 1.0, ExitCause(None, 9))))
    run.close(keep_logs=True)
    shown, _ = list_runs(with_ended=True)
    assert (shown.status, shown.verdict, shown.what_to_do) == ("ended", killed.message, killed.hint)
    assert table([shown])[-1] == f"{run.path} is ended: rank 0 was ended by SIGKILL."


def test_a_verdict_that_was_withdrawn_counts_no_more_and_stays_in_the_record(run: RunDirectory) -> None:
    fill(run)
    failure = Failure("rank 0 (pid 7) is stopped.", "let it go on", 6)
    stall = Stalled(failure, "rank-0", "process-stopped", "proved")
    keep_verdict(run.path, Verdict(6, failure, stall=stall))
    first = last_run_verdict(run.path)
    keep_verdict(run.path, Verdict(6, failure, stall=Stalled(failure, "rank-0")))  # the same once more
    assert last_run_verdict(run.path) == first
    assert [one.status for one in list_runs()] == ["stuck"]
    withdraw_verdict(run.path)
    assert [(one.status, one.verdict) for one in list_runs()] == [("starting", "")]
    last = last_run_verdict(run.path)
    assert last is not None
    assert (last.message, last.cause, last.withdrawn_s is None) == (failure.message, "process-stopped", False)


def test_a_run_that_has_written_nothing_yet_is_one_too(run: RunDirectory) -> None:
    (shown,) = list_runs()
    assert (shown.status, shown.model, shown.processes) == ("starting", None, ())


def test_who_is_lost_is_shown_with_its_end(run: RunDirectory) -> None:
    fill(run)
    write_exit_note(run.path, note("rank-0", told=False))
    (shown,) = list_runs()
    assert shown.status == "lost"
    assert not shown.processes[1].is_alive
    assert " lost " in table([shown])[3]


@pytest.mark.parametrize(
    ("phases", "told", "status"),
    [
        ({"rank-0": "serving", "api": "serving"}, None, "ready"),
        ({"rank-0": "ready", "api": "serving"}, None, "ready"),
        ({"rank-0": "ready", "api": "ready"}, None, "starting"),
        ({"rank-0": "ready", "rank-1": "kv", "api": "serving"}, None, "starting"),
        ({}, None, "starting"),
        ({"rank-0": "serving", "api": "drain"}, None, "stopping"),
        ({"rank-0": "serving", "api": "serving"}, True, "stopping"),
        ({"rank-0": "serving", "api": "serving"}, False, "lost"),
    ],
)
def test_the_status(phases: dict[str, str], told: bool | None, status: str) -> None:
    processes = [
        ProcessView(name=name, role="any", rank=None if name == "api" else 0, phase=phase)
        for name, phase in phases.items()
    ]
    notes = {} if told is None else {"api": note("api", told=told)}
    assert status_of("here", processes, notes) == status
    assert status_of("ended", processes, notes) == "ended"


def test_an_api_that_the_supervisor_ended_itself_is_lost_and_not_stopping(run: RunDirectory) -> None:
    fill(run)
    write_exit_note(run.path, note("api", told=True))
    assert list_runs()[0].status == "stopping"
    failure = Failure("the api process (pid 7) is stopped.", "let it go on", 6)
    stalled = Verdict(6, failure, stall=Stalled(failure, "api"))
    socket = DoctorSocket(run.path, lambda: stalled, lambda: "lost")
    try:
        (shown,) = list_runs()
        assert shown.status == "lost"
        assert table([shown])[-1] == f"{run.path} is lost: the api process (pid 7) is stopped."
    finally:
        socket.close()


def test_a_run_is_found_by_directory_name_and_pid(run: RunDirectory) -> None:
    for wanted in (str(run.path), run.path.name, str(os.getpid())):
        assert find_run(wanted)[0] == run.path
    with pytest.raises(UsageError, match="is called 1") as refused:
        find_run("1")
    assert run.path.name in refused.value.hint


def test_whose_pid_means_nothing_here_gets_no_signal(run: RunDirectory) -> None:
    another = RunRecord(os.getpid(), 1, 0.0)  # our number, but not our start
    with pytest.raises(UsageError, match="another container"):
        stop_run(run.path, another)


def test_who_does_not_leave_in_time_is_said(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(stop, "_send", lambda record, number: sent.append(number))
    monkeypatch.setattr(stop, "_wait", lambda is_over, for_s: is_over())
    _, record = find_run(run.path.name)
    with pytest.raises(EngineError, match="within 26 s") as late:
        stop_run(run.path, record)
    assert "--now" in late.value.hint
    with pytest.raises(EngineError, match="are left"):
        stop_run(run.path, record, now=True)
    assert sent == [15, 15, 15, 9]
