"""`firstlight ps` and `firstlight stop` with a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.serving import RunningServer, write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def firstlight(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firstlight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def run_of(server: RunningServer) -> dict[str, Any]:
    runs = json.loads(firstlight("ps", "--json").stdout)["runs"]
    return next(run for run in runs if run["pid"] == server.pid)


def test_a_ready_server_is_listed_and_stopped_by_its_name(model: Path) -> None:
    with RunningServer(model) as server:
        run = run_of(server)
        assert (run["status"], run["model"], run["url"]) == ("ready", "tiny", server.url)
        children = {child.pid for child in psutil.Process(server.pid).children()}
        assert {process["pid"] for process in run["processes"]} < children
        assert [(p["name"], p["rank"], p["is_alive"]) for p in run["processes"]] == [
            ("api", None, True),
            ("rank-0", 0, True),
        ]
        assert run["run_dir"] in firstlight("ps").stdout
        stopped = firstlight("stop", Path(run["run_dir"]).name)
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert server.wait() == 0
    again = firstlight("stop", str(server.pid))
    assert again.returncode == 2
    assert "no run of yours" in again.stderr


def test_a_supervisor_that_does_not_move_is_killed_with_all_that_is_its_own(model: Path) -> None:
    with RunningServer(model) as server:
        children = psutil.Process(server.pid).children(recursive=True)
        os.kill(server.pid, signal.SIGSTOP)
        stopped = firstlight("stop", "--now", str(server.pid))
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert server.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
