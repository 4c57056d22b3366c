"""`firstlight doctor` as an operator runs it, on real servers that are well, stopped, or dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from firstlight.base.process import start_ticks
from firstlight.doctor.case.bundle import read_bundle
from firstlight.doctor.case.values_process import PythonStacks
from support.ports import free_port
from support.serving import RunningServer, write_chat_model

DEADLINE_S = 60
WITHOUT_RIGHTS = (sys.executable, "-m", "support.without_rights")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with RunningServer(model) as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "firstlight", "doctor", *arguments]


def doctor(*arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run([*within, *command(*arguments)])


def run(whole: list[str]) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        whole,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


def one(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The only server of a JSON report."""
    (found,) = json.loads(done.stdout)["servers"]
    assert isinstance(found, dict)
    return found


def rank_of(server: RunningServer) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    alive = [child for child in children if start_ticks(child.pid) is not None]
    return next(child for child in alive if "engine.rank" in " ".join(child.cmdline()))


@pytest.fixture
def stopped(server: RunningServer) -> Iterator[psutil.Process]:
    """The rank, stopped while the server serves."""
    rank = rank_of(server)
    rank.suspend()
    yield rank
    rank.resume()


def test_an_idle_server_is_healthy(server: RunningServer) -> None:
    done = doctor("--pid", str(server.pid))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("HEALTHY: ")
    assert "[idle, supported]" in done.stdout.splitlines()[0]
    assert f"rank-0      {rank_of(server).pid}" in done.stdout


def test_a_token_can_be_asked_for(server: RunningServer) -> None:
    done = doctor("--url", server.url, "--generate", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert one(done)["condition"] == "healthy"
    assert one(done)["target"]["engine"] == "native"


def test_it_finds_the_server_by_itself(server: RunningServer) -> None:
    done = doctor("--json", "--looks", "1")
    found = json.loads(done.stdout)
    pids = {process["pid"] for one in found["servers"] for process in one["target"]["processes"]}
    assert {server.pid, rank_of(server).pid} <= pids
    assert done.returncode == found["exit_code"]


def test_a_stopped_rank_is_named_with_the_command_that_helps(
    server: RunningServer, stopped: psutil.Process
) -> None:
    done = doctor("--pid", str(server.pid))
    assert done.returncode == 12, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"STUCK: rank 0 (pid {stopped.pid}) is stopped")
    assert first.endswith("[process-stopped, proved]")
    assert f"kill -CONT {stopped.pid}" in done.stdout
    assert f"rank-0      {stopped.pid}  stopped" in done.stdout


def test_a_bundle_says_the_same_elsewhere(
    server: RunningServer, stopped: psutil.Process, tmp_path: Path
) -> None:
    path = tmp_path / "stall.bundle"
    here = doctor("--pid", str(server.pid), "--bundle", str(path), "--json")
    assert here.returncode == 12, here.stderr
    stopped.resume()  # what is true now must not matter
    there = doctor("--replay", str(path), "--json")
    assert there.returncode == 12, there.stderr
    assert one(there) == one(here)
    again = doctor("--pid", str(server.pid), "--bundle", str(path))
    assert again.returncode == 2
    assert "exists already" in again.stderr
    issue = doctor("--replay", str(path), "--markdown")
    assert issue.returncode == 12
    assert issue.stdout.startswith("# STUCK: rank 0")
    assert "## Evidence" in issue.stdout


@pytest.mark.parametrize("has_supervisor", [True, False])
def test_where_it_may_not_look_it_is_helped(
    server: RunningServer, tmp_path: Path, has_supervisor: bool
) -> None:
    """Refused by the kernel: the supervisor takes the stacks, else the ranks write them themselves."""
    path, run_dir = tmp_path / "x.bundle", _run_dir(server)
    sock, away = run_dir / "doctor.sock", run_dir / "away.sock"
    if not has_supervisor:
        sock.rename(away)
    try:
        done = doctor("--pid", str(server.pid), "--bundle", str(path), within=WITHOUT_RIGHTS)
    finally:
        if not has_supervisor:
            away.rename(sock)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = read_bundle(path)[0].all(PythonStacks, subject="rank-0")
    assert len(seen) == 2
    # Without root there is nothing to take away: then py-spy itself may look.
    by = "the run's supervisor" if has_supervisor else "a signal that the process handles"
    assert all(by in one.evidence.source for one in seen) == (os.geteuid() == 0)
    assert any("receive" in frame.function for frame in seen[0].value.threads[0].frames)


def test_a_stopped_rank_is_named_without_any_right(server: RunningServer, stopped: psutil.Process) -> None:
    done = doctor("--pid", str(server.pid), within=WITHOUT_RIGHTS)
    assert done.returncode == 12, done.stdout + done.stderr
    assert f"rank 0 (pid {stopped.pid}) is stopped" in done.stdout


def test_another_user_gets_a_verdict_too(server: RunningServer, stopped: psutil.Process) -> None:
    """As nobody, who may read neither the run directory nor what is open in its processes."""
    done = run([sys.executable, "-m", "support.as_nobody", str(server.pid)])
    assert done.returncode == 12, done.stdout + done.stderr
    assert one(done)["cause"] == "process-stopped"
    assert one(done)["subject"] == "rank-0"
    assert str(stopped.pid) in one(done)["summary"]


@pytest.mark.parametrize("who", ["rank", "supervisor"])
def test_a_run_that_was_killed_is_dead(model: Path, who: str) -> None:
    with RunningServer(model, "--on-stall", "exit") as running:
        run_dir = _run_dir(running)
        if who == "rank":
            rank_of(running).kill()
            assert running.wait() == 6
        else:
            running.kill()
    _wait_for_the_end(run_dir)
    done = doctor("--run", str(run_dir))
    assert done.returncode == 13, done.stdout + done.stderr
    assert done.stdout.startswith("DEAD: ")
    if who == "rank":
        assert "rank 0" in done.stdout.splitlines()[0]


def _wait_for_the_end(run_dir: Path) -> None:
    """Until no process of the run is left; its janitor sees to that."""
    deadline_s = time.monotonic() + 10
    while any(str(run_dir) in " ".join(found.info["cmdline"] or ()) for found in _processes()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _processes() -> Iterator[psutil.Process]:
    return psutil.process_iter(["cmdline"])


def test_a_port_on_which_nobody_listens(free_port_number: int) -> None:
    done = doctor("--url", f"http://127.0.0.1:{free_port_number}", "--looks", "1")
    assert done.returncode == 2
    assert f"listens on port {free_port_number}" in done.stderr
    assert "what to do: " in done.stderr


def test_a_process_that_serves_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        done = doctor("--pid", str(sleeper.pid))
        sleeper.kill()
    assert done.returncode == 2
    assert "belongs to no model server" in done.stderr


@pytest.fixture
def free_port_number() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pid", "1", "--url", "x"), "point at different things"),
        (("--replay", "x", "--watch"), "looks at none"),
        (("--json", "--markdown"), "two forms"),
        (("--watch", "--markdown"), "a line for each change"),
        (("--pid", "4194999"), "there is no process 4194999"),
        (("--run", "no-such-run"), "is called no-such-run"),
        (("--replay", "no-such-file"), "cannot read no-such-file"),
    ],
)
def test_wrong_options_end_with_a_remedy(arguments: tuple[str, ...], words: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "what to do: " in done.stderr


def test_a_watch_tells_each_change_once(server: RunningServer) -> None:
    rank = rank_of(server)
    watch = subprocess.Popen(
        command("--pid", str(server.pid), "--watch", "--interval", "0.5"), stdout=subprocess.PIPE, text=True
    )
    assert watch.stdout is not None
    try:
        assert "HEALTHY: " in watch.stdout.readline()
        rank.suspend()
        line = watch.stdout.readline()
        assert f"STUCK: rank 0 (pid {rank.pid}) is stopped" in line
        assert f"kill -CONT {rank.pid}" in line
        time.sleep(0.1)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(DEADLINE_S) == 12
        assert watch.stdout.read() == ""
    finally:
        rank.resume()
        watch.kill()
        watch.communicate()


def _run_dir(server: RunningServer) -> Path:
    arguments = rank_of(server).cmdline()
    return Path(arguments[arguments.index("--run-dir") + 1])
