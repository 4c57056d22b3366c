"""The private directory of a run, and what becomes of those that ended runs left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from firstlight.base.config import API_KEYS_FILE
from firstlight.base.process import start_ticks
from firstlight.launch.runs import run_directory, run_record
from firstlight.launch.runs.run_directory import (
    ended_runs,
    living_runs,
    make_run_directory,
    remove_ended_runs,
    write_api_keys,
)
from firstlight.launch.runs.run_record import RECORD_FILE, RunRecord, ended_run

DAY_S = 24 * 3600


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where run directories are made and looked for."""
    monkeypatch.setattr(run_directory, "_parents", lambda: [tmp_path])
    monkeypatch.setattr(run_directory, "_fits", lambda _: True)
    return tmp_path


def leave_run(parent: Path, name: str, *, age_s: float = 0.0) -> Path:
    """What a launcher that was killed left `age_s` ago."""
    run_dir = parent / f"firstlight-{name}"
    run_dir.mkdir()
    record = RunRecord(pid=os.getpid(), start_ticks=1, started_s=0.0)  # our number, but another process
    (run_dir / RECORD_FILE).write_bytes(msgspec.json.encode(record))
    (run_dir / "rank-0.log").write_text("the end")
    for path in (*run_dir.iterdir(), run_dir):
        written_s = path.stat().st_mtime - age_s
        os.utime(path, (written_s, written_s))
    return run_dir


def test_only_we_can_enter_it_and_read_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = make_run_directory()
    run_dir = directory.path
    write_api_keys(run_dir, ["one", "two"])
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / API_KEYS_FILE).stat().st_mode) == 0o600
    assert (run_dir / API_KEYS_FILE).read_text() == "one\ntwo\n"
    directory.close(keep_logs=False)
    assert not run_dir.exists()


def test_after_a_crash_the_logs_stay_and_the_secrets_go(parent: Path) -> None:
    directory = make_run_directory()
    write_api_keys(directory.path, ["one"])
    (directory.path / "rank-0.log").write_text("the end")
    directory.close(keep_logs=True)
    assert sorted(path.name for path in directory.path.iterdir()) == ["ended", "rank-0.log", RECORD_FILE]


def test_an_attempt_that_failed_is_over_although_its_launcher_goes_on(parent: Path) -> None:
    first, second = make_run_directory(), make_run_directory()
    first.close(keep_logs=True)
    assert (ended_runs(), list(living_runs())) == ([first.path], [second.path])
    second.close(keep_logs=False)


def test_a_folder_with_a_long_path_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    directory = make_run_directory()
    assert not directory.path.is_relative_to(deep)
    directory.close(keep_logs=False)


def test_the_record_names_the_launcher(parent: Path) -> None:
    directory = make_run_directory()
    record = msgspec.json.decode((directory.path / RECORD_FILE).read_bytes(), type=RunRecord)
    assert (record.pid, record.start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    assert record.is_running()
    directory.close(keep_logs=False)


def test_the_newest_few_of_the_last_day_stay(parent: Path) -> None:
    runs = [leave_run(parent, str(number), age_s=60.0 * number) for number in range(8)]
    old = leave_run(parent, "old", age_s=2 * DAY_S)
    remove_ended_runs()
    assert [run.exists() for run in runs] == [True] * 5 + [False] * 3
    assert not old.exists()


def test_a_run_whose_launcher_lives_stays_however_old_it_is(parent: Path) -> None:
    directory = make_run_directory()
    for path in (*directory.path.iterdir(), directory.path):
        os.utime(path, (0, 0))
    remove_ended_runs()
    assert directory.path.exists()
    directory.close(keep_logs=False)


def test_either_the_lock_or_the_process_keeps_a_run(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run_directory()
    monkeypatch.setattr(run_record, "start_ticks", lambda pid: None)  # as from within another container
    assert ended_run(directory.path) is None
    monkeypatch.undo()
    directory.close(keep_logs=True)  # gives the lock back, and this process goes on
    (directory.path / "ended").unlink()
    assert ended_run(directory.path) is None


def test_a_launcher_that_was_killed_leaves_an_ended_run(parent: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from firstlight.launch.runs.run_directory import RunDirectory\n"
        "d = RunDirectory(Path(sys.argv[1])); print('made', flush=True); time.sleep(60)"
    )
    run_dir = parent / "firstlight-killed"
    run_dir.mkdir()
    child = subprocess.Popen([sys.executable, "-c", script, str(run_dir)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"made\n"
        assert ended_run(run_dir) is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert ended_run(run_dir) is not None


def test_what_is_not_a_run_of_ours_is_left_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = leave_run(parent, "elsewhere", age_s=2 * DAY_S).rename(parent / "elsewhere")
    link = parent / "firstlight-link"
    link.symlink_to(elsewhere)
    no_record = parent / "firstlight-plain"
    no_record.mkdir()
    linked_record = parent / "firstlight-linked"
    linked_record.mkdir()
    (linked_record / RECORD_FILE).symlink_to(elsewhere / RECORD_FILE)
    half_written = parent / "firstlight-half"
    half_written.mkdir()
    (half_written / RECORD_FILE).write_text("{")
    pipe = parent / "firstlight-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / RECORD_FILE)
    monkeypatch.setattr(run_directory, "_KEPT_RUNS", 0)
    before = sorted(parent.rglob("*"))
    remove_ended_runs()
    assert sorted(parent.rglob("*")) == before


def test_another_user_s_run_is_left_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = leave_run(parent, "theirs", age_s=2 * DAY_S)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    remove_ended_runs()
    assert run.exists()
    monkeypatch.undo()
    assert ended_run(run) is not None
