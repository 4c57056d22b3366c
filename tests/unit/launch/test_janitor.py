"""The janitor against real processes, after a real SIGKILL of who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firstlight.launch import janitor
from firstlight.launch.processes.janitor_process import _own_group

SOURCES = Path(__file__).parents[3] / "src"
# A supervisor that starts a janitor and three processes, says their pids, and waits to be killed.
SUPERVISOR = """
import os, subprocess, sys, time
from firstlight.launch.janitor import RUN_VARIABLE
from firstlight.launch.processes.janitor_process import start_janitor
run_id, socket_path, link = sys.argv[1:4]
janitor = start_janitor(run_id, [socket_path, link])
marked = {**os.environ, RUN_VARIABLE: run_id}
sleep = "import time; time.sleep(600)"
plain = subprocess.Popen([sys.executable, "-c", sleep], env=marked, start_new_session=True)
# A grandchild in a session of its own, whose parent has gone.
nested = (
    "import subprocess, sys; "
    "sleep = [sys.executable, '-c', %r]; "
    "print(subprocess.Popen(sleep, start_new_session=True, stdout=-3, stderr=-3).pid)" % sleep
)
run = subprocess.run([sys.executable, "-c", nested], env=marked, capture_output=True, text=True)
orphan = int(run.stdout)
# One that hides the token, but was named.
hidden = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
janitor.name(hidden.pid)
print(plain.pid, orphan, hidden.pid, flush=True)
if sys.argv[4] == "dismiss":
    janitor.dismiss()
    print("dismissed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def bystander() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def start(tmp_path: Path, mode: str) -> tuple[subprocess.Popen[str], list[int]]:
    real = tmp_path / "memory"
    real.mkdir()
    (real / "rank-0.box").write_text("kept")
    (tmp_path / "boxes").symlink_to(real)
    (tmp_path / "a.sock").touch()
    arguments = [f"run-{tmp_path.name}", str(tmp_path / "a.sock"), str(tmp_path / "boxes"), mode]
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCES)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def is_alive(pid: int) -> bool:
    return janitor.read_stat(pid) is not None


def test_after_a_kill_of_the_supervisor_nothing_of_the_run_is_left(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    supervisor, pids = start(tmp_path, "die")
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    end(supervisor)
    deadline_s = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
    kept = tmp_path / "boxes" / "rank-0.box"
    while not ((tmp_path / "boxes").is_dir() and kept.exists()) or (tmp_path / "memory").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert not (tmp_path / "a.sock").exists()
    assert kept.read_text() == "kept"
    assert not (tmp_path / "memory").exists()
    assert bystander.poll() is None


def test_a_janitor_that_is_dismissed_touches_nothing(tmp_path: Path) -> None:
    supervisor, pids = start(tmp_path, "dismiss")
    try:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "dismissed\n"
        assert all(map(is_alive, pids))
        assert (tmp_path / "a.sock").exists()
    finally:
        end(supervisor)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if (group := _own_group(Path("/proc"))) is not None:  # it could not go with somebody left in it
            janitor.remove_tree(str(group / f"firstlight-run-{tmp_path.name}"))


def test_the_session_of_a_stranger_with_an_old_number_is_spared(tmp_path: Path) -> None:
    """A process of ours ended, and its number went to a daemon's first process, which ended too."""
    daemon = (
        "import subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(600)']; "
        "print(subprocess.Popen(sleep, stdout=-3, stderr=-3).pid)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", daemon], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    member = int(first.communicate()[0])
    try:
        assert janitor.members("no such run", {first.pid: 12345}, set()) == {}
        # A session that one of ours had opened is ours, whoever is left of it.
        assert list(janitor.members("no such run", {first.pid: 12345}, {first.pid})) == [member]
    finally:
        os.kill(member, signal.SIGKILL)


def test_an_ancestor_is_no_member_whatever_it_carries() -> None:
    """A wrapper that has our token, as where a run is started from within another one's environment."""
    script = (
        "import os, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', "
        "'import os; from firstlight.launch import janitor; "
        'print(os.getppid() in janitor.members("r-1", {os.getppid(): janitor.read_stat(os.getppid())[3]}), '
        'len(janitor.members("r-1", {})))\']))'
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, janitor.RUN_VARIABLE: "r-1", "PYTHONPATH": str(SOURCES)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "0"]


def test_a_control_group_goes_with_those_below_it(tmp_path: Path) -> None:
    group = tmp_path / "group"
    (group / "made by a child" / "and its child").mkdir(parents=True)
    assert janitor.remove_tree(str(group), 0)
    assert not group.exists()
    (group / "busy").mkdir(parents=True)
    (group / "busy" / "file").touch()  # as the kernel refuses while somebody is left
    assert not janitor.remove_tree(str(group), 0)
    assert (group / "busy").exists()


def test_a_number_that_another_process_got_is_not_ended(bystander: subprocess.Popen[bytes]) -> None:
    assert janitor.end_all("no such run", {bystander.pid: 12345}, 0.2) == []
    assert bystander.poll() is None
