"""Children: how they end, and that they do not outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firstlight.base.process import Child, ExitCause, start_child, start_ticks


def wait_for_end(child: Child) -> ExitCause:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        cause = child.poll()
        if cause is not None:
            child.close()
            return cause
        time.sleep(0.005)
    raise AssertionError("the child did not end")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_the_end_is_described(script: str, text: str) -> None:
    assert wait_for_end(start_child([sys.executable, "-c", script], os.environ)).describe() == text


def test_a_signal_without_a_name() -> None:
    assert ExitCause.from_returncode(-250).describe() == "was ended by signal 250"


def test_output_of_both_streams_is_readable() -> None:
    script = "import os; os.write(1, b'out '); os.write(2, b'err')"
    child = start_child([sys.executable, "-c", script], os.environ)
    while child.poll() is None:
        time.sleep(0.005)
    assert os.read(child.output_fd, 100) == b"out err"
    child.close()


def test_cores_are_bound() -> None:
    core = min(os.sched_getaffinity(0))
    script = f"import os; raise SystemExit(os.sched_getaffinity(0) != {{{core}}})"
    child = start_child([sys.executable, "-c", script], os.environ, cores=frozenset({core}))
    assert wait_for_end(child).code == 0


def test_signals_reach_the_whole_group() -> None:
    child = start_child(["sh", "-c", "sleep 60 & sleep 60"], os.environ)
    child.send(signal.SIGTERM)
    assert wait_for_end(child).signal == signal.SIGTERM


def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"""
import os, sys, time
from firstlight.base.process import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
open({str(note)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(note.read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_start_ticks_tell_a_process_from_its_successors() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    assert ticks >= (start_ticks(os.getpid()) or 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None, "one that nobody has waited for has ended too"
    child.communicate()
    assert start_ticks(child.pid) is None
