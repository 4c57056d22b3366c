"""The real vLLM on the CPU, served through firstlight and examined without it. Run by `make test-vllm`.

A start takes one to three minutes on two cores, so there are few of them. Invariant: nothing here is a
stand-in: vLLM is the installed one, the model is real, and processes are really stopped.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support import serving
from support.foreign import NAME, PYTHON, READY_S, SIZES, until, vllm_by_hand
from support.serving import RunningServer

pytestmark = pytest.mark.timeout(900)

CORE = "VLLM::EngineCore"
OURS = (*SIZES, "--max-batched-tokens", "256", "--memory-fraction", "0.2")
STUCK = 12  # the doctor's exit code


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "READY_DEADLINE_S", READY_S)
    monkeypatch.setattr(serving, "STOP_DEADLINE_S", 60.0)


def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a command of ours prints."""
    command = [sys.executable, "-m", "firstlight", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in codes, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def serve(model: Path) -> RunningServer:
    backend = ("--backend", "vllm", "--backend-python", str(PYTHON), "--served-name", NAME)
    return RunningServer(model, *backend, *OURS, "--", "--enforce-eager")


def core_below(pid: int) -> psutil.Process:
    """vLLM's engine core among the descendants of a process, once it is there."""

    def look() -> psutil.Process | None:
        below = psutil.Process(pid).children(recursive=True)
        return next((child for child in below if CORE in "".join(child.cmdline())), None)

    return until(look, READY_S)


def test_from_the_first_phase_to_a_stream_and_through_a_stop_of_its_engine(model: Path) -> None:
    server = serve(model)
    try:
        seen: list[str] = []
        while not any(line.startswith("ready in") for line in server.lines):
            assert time.monotonic() - server.started_s < READY_S
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{server.url}/v1/models", timeout=5)
                if answer.status_code == 503:
                    assert answer.headers["retry-after"]
                phase = httpx.get(f"{server.url}/startup", timeout=5).json().get("phase")
                if phase and (not seen or seen[-1] != phase):
                    seen.append(phase)
            time.sleep(0.05)
        assert [phase for phase in ("spawn", "imports", "weights", "prepare") if phase in seen]
        said = "\n".join(server.lines)
        for phase in ("rendezvous", "weights     1 of 1 shards", "kv ", "self-test"):
            assert phase in said, said
        assert _stream(server)
        _stopped_while_serving(server)
        assert _stream(server)
        assert server.stop() == 0
    finally:
        server.kill()
    assert server.lines[-1] == "stopped."


def _stream(server: RunningServer) -> str:
    """A chat answer, piece by piece."""
    messages = [{"role": "user", "content": "What is 2+2?"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
    text, pieces = "", 0
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
                text, pieces = text + piece, pieces + bool(piece)
    assert pieces > 3
    return text


def _stopped_while_serving(server: RunningServer) -> None:
    core = core_below(server.pid)
    core.suspend()
    started_s = time.monotonic()
    try:
        message = until(lambda: _refusal(server))
        print(f"named {time.monotonic() - started_s:.1f} s after the stop: {message}")
        assert f"(pid {core.pid}) is stopped, in phase serving" in message
        assert f"kill -CONT {core.pid}" in message
    finally:
        core.resume()
    until(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 200)


def _refusal(server: RunningServer) -> str:
    answer = httpx.get(f"{server.url}/health", timeout=5)
    return str(answer.json()["error"]["message"]) if answer.status_code == 503 else ""


def test_its_engine_stopped_during_the_start_is_named(model: Path) -> None:
    server = serve(model)
    try:
        core = core_below(server.pid)
        core.suspend()
        assert server.wait() == 6
        said = next(line for line in server.lines if line.startswith("error: "))
        print(said)
        assert f"(pid {core.pid}) is stopped" in said
    finally:
        server.kill()


def test_a_server_that_somebody_else_started(model: Path, tmp_path: Path) -> None:
    """The doctor alone: stopped during the start, then while it serves."""
    with vllm_by_hand(model, tmp_path) as (process, url):
        core = core_below(process.pid)
        assert named_by_the_doctor(process, core)
        until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 200, READY_S)
        assert examined(process)["condition"] == "healthy"
        assert named_by_the_doctor(process, core)


def examined(process: subprocess.Popen[bytes], code: int = 0) -> Any:
    """The doctor's verdict on a server that is none of ours."""
    said = json.loads(run("doctor", "--pid", str(process.pid), "--json", codes=(code,)))
    assert len(said["servers"]) == 1
    return said["servers"][0]


def named_by_the_doctor(process: subprocess.Popen[bytes], core: psutil.Process) -> bool:
    core.suspend()
    try:
        verdict = examined(process, STUCK)
    finally:
        core.resume()
    print(verdict["summary"])
    assert (verdict["condition"], verdict["cause"]) == ("stuck", "process-stopped")
    return str(core.pid) in verdict["summary"]


def test_its_log_still_says_what_the_grammar_reads() -> None:
    said = run("grammar", "vllm", "--backend-python", str(PYTHON))
    print(said)
    assert "not found" not in said
