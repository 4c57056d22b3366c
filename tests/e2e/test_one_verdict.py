"""One event has one verdict: client, terminal, /startup, `ps` and the doctor say the same of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.serving import RunningServer, write_chat_model

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def firstlight(*arguments: str) -> Any:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "firstlight", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return json.loads(done.stdout)


def run_of(server: RunningServer) -> dict[str, Any]:
    return next(run for run in firstlight("ps", "--all")["runs"] if run["pid"] == server.pid)


def rank_of(server: RunningServer, rank: int = 0) -> psutil.Process:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"--rank {rank}" in " ".join(child.cmdline()):
                    return child
    raise AssertionError("there is no such rank")


class Asked(threading.Thread):
    """A long completion; what its client got."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        body = {"prompt": ["x"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):
            self.answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=DEADLINE_S)

    def said(self) -> str:
        self.join(DEADLINE_S)
        assert self.answer is not None
        assert self.answer.status_code == 503
        return str(self.answer.json()["error"]["message"])


def assert_all_say(server: RunningServer, run_dir: str, message: str) -> dict[str, Any]:
    """Terminal, `ps` and doctor, after the end; the doctor's verdict."""
    assert [line for line in server.lines if line.startswith("error: ")] == [f"error: {message}"]
    shown = run_of(server)
    assert (shown["run_dir"], shown["status"], shown["verdict"]) == (run_dir, "ended", message)
    (found,) = firstlight("doctor", "--run", run_dir, "--looks", "1")["servers"]
    assert (found["summary"], found["remedy"]) == (message, shown["what_to_do"])
    assert (found["condition"], found["subject"]) == ("dead", "rank-0")
    assert isinstance(found, dict)
    return found


def test_a_rank_that_is_killed(model: Path) -> None:
    with RunningServer(model) as server:
        run_dir = run_of(server)["run_dir"]
        asked = Asked(server)
        time.sleep(0.1)
        rank_of(server).kill()
        assert "rank 0 was ended by SIGKILL." in asked.said()
        assert server.wait() == 6
    found = assert_all_say(server, run_dir, "rank 0 was ended by SIGKILL.")
    assert (found["cause"], found["grade"]) == ("rank-died", "proved")


def test_a_rank_that_stands_still_and_is_ended_for_it(model: Path) -> None:
    with RunningServer(model, "--on-stall", "exit") as server:
        run_dir = run_of(server)["run_dir"]
        asked = Asked(server)
        time.sleep(0.1)
        rank = rank_of(server)
        rank.suspend()
        said = asked.said()
        assert server.wait() == 6
    message = run_of(server)["verdict"]
    assert f"rank 0 (pid {rank.pid}) is stopped, in phase serving" in message
    assert message in said
    found = assert_all_say(server, run_dir, message)
    assert found["cause"] == "process-stopped"
    assert "it is ended" in found["remedy"]


def test_a_rank_that_dies_in_the_start(model: Path) -> None:
    server = RunningServer(model, "--tensor-parallel", "2")
    try:
        rank = rank_of(server)
        message = "rank 0 was ended by SIGKILL."
        with httpx.stream("GET", f"{server.url}/startup/events", timeout=DEADLINE_S) as stream:
            rank.kill()
            *_, event, data = [line for line in stream.iter_lines() if line]
        assert event == "event: failed"
        told = json.loads(data.removeprefix("data: "))
        assert told["verdict"]["message"] == message
        assert server.wait() == 6
    finally:
        server.kill()
    assert_all_say(server, run_of(server)["run_dir"], message)


def test_a_stall_that_lasts_is_told_alike_and_withdrawn(model: Path) -> None:
    with RunningServer(model) as server:
        rank = rank_of(server)
        asked = Asked(server)
        time.sleep(0.1)
        rank.suspend()
        try:
            said = asked.said()
            shown = run_of(server)
            told = httpx.get(f"{server.url}/startup").json()
            (found,) = firstlight("doctor", "--run", shown["run_dir"])["servers"]
        finally:
            rank.resume()
        assert (shown["status"], shown["verdict"]) == ("stuck", told["verdict"]["message"])
        assert shown["verdict"] in said
        assert (found["condition"], found["cause"]) == ("stuck", "process-stopped")
        assert found["remedy"] == told["verdict"]["what_to_do"] == f"let it go on: `kill -CONT {rank.pid}`."
        assert any(shown["verdict"] in clue["text"] for clue in found["for"])
        deadline = time.monotonic() + DEADLINE_S
        while run_of(server)["status"] != "ready":
            assert time.monotonic() < deadline
        assert run_of(server)["verdict"] == ""
        assert server.stop() == 0
