"""An engine that stands still, as its clients and its operator see it: real processes, really stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.serving import RunningServer, write_chat_model

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def child_of(server: RunningServer, words: str) -> psutil.Process:
    """The child whose command has these words; waits for its start."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(child.cmdline()):
                    return child
        time.sleep(0.01)
    raise AssertionError(f"no child {words!r}")


def health(server: RunningServer) -> tuple[int, str]:
    """Status and message; 0 when nobody answers in time."""
    try:
        answer = httpx.get(f"{server.url}/health", timeout=2)
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, "" if answer.is_success else str(answer.json()["error"]["message"])


def verdict_of(server: RunningServer, words: str) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        _, message = health(server)
        if words in message:
            return message
        time.sleep(0.05)
    raise AssertionError(f"the port never said {words!r}; last: {message!r}")


class Request(threading.Thread):
    """A completion in a thread."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        body = {"prompt": ["x"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):
            self.answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=60)


def test_a_rank_that_is_stopped_while_serving_is_named_and_may_come_back(model: Path) -> None:
    with RunningServer(model) as server:
        rank = child_of(server, "engine.rank")
        request = Request(server)
        time.sleep(0.2)
        rank.suspend()
        message = verdict_of(server, "is stopped")
        assert f"rank 0 (pid {rank.pid}) is stopped, in phase serving" in message
        assert f"kill -CONT {rank.pid}" in message
        request.join(DEADLINE_S)
        assert request.answer.status_code == 503
        assert f"(pid {rank.pid}) is stopped" in request.answer.json()["error"]["message"]
        rank.resume()
        deadline = time.monotonic() + DEADLINE_S
        while health(server)[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        done = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
        assert done.is_success
        assert server.stop() == 0


def test_an_api_process_that_is_stopped_ends_the_run(model: Path) -> None:
    with RunningServer(model) as server:
        api = child_of(server, "serve.api")
        api.suspend()
        assert server.wait() == 6
        _, alive = psutil.wait_procs([api], timeout=5)
        assert alive == []
    said = next(line for line in server.lines if line.startswith("error: "))
    assert f"the api process (pid {api.pid}) is stopped" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_is_stopped_while_starting_ends_the_start_with_its_name(model: Path, ranks: int) -> None:
    server = RunningServer(model, "--tensor-parallel", str(ranks))
    try:
        rank = child_of(server, f"--rank {ranks - 1}")
        rank.suspend()
        assert server.wait() == 6
        said = next(line for line in server.lines if line.startswith("error: "))
        assert f"rank {ranks - 1} (pid {rank.pid}) is stopped, in phase " in said
    finally:
        server.kill()


def test_an_idle_server_is_healthy(model: Path) -> None:
    with RunningServer(model, "--stall-look", "1", "--stall-verdict", "2") as server:
        for _ in range(12):
            assert health(server)[0] == 200
            time.sleep(0.5)
        assert server.stop() == 0
    assert not [line for line in server.lines if line.startswith("error")]


def test_a_stop_during_a_stall_does_not_wait_for_it(model: Path) -> None:
    with RunningServer(model) as server:
        child_of(server, "engine.rank").send_signal(signal.SIGSTOP)
        Request(server)
        verdict_of(server, "is stopped")
        started_s = time.monotonic()
        assert server.stop() == 6
        assert time.monotonic() - started_s < 10
