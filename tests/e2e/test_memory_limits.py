"""The default model in control groups of little memory: served within them, or refused with the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import RunningServer

DEADLINE_S = 120.0
MEMORY = Path("/sys/fs/cgroup/memory")
LONG = " ".join(["The quick brown fox jumps over the lazy dog."] * 60)
pytestmark = [pytest.mark.needs("memory cgroup"), pytest.mark.slow]


@pytest.fixture
def limited(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path]]:
    """A control group of so many megabytes, and an interpreter whose processes are in it."""
    group = MEMORY / f"firstlight-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(request.param * 2**20))
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    yield group, program
    deadline = time.monotonic() + DEADLINE_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


def ask(url: str, **more: Any) -> Any:
    body = {"max_tokens": 24, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.is_success, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def answers(url: str) -> list[Any]:
    """A short prompt, a long one, and several at once."""
    return [ask(url, prompt="What is 2+2?"), ask(url, prompt=LONG), ask(url, prompt=["One", LONG] * 6)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with RunningServer(None) as server:
        found = answers(server.url)
        assert server.stop() == 0
    return found


@pytest.mark.parametrize("limited", [400, 600], indirect=True)
def test_the_default_model_is_served(
    limited: tuple[Path, Path], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, program = limited
    monkeypatch.setattr(sys, "executable", str(program))
    with RunningServer(None) as server:
        assert answers(server.url) == expected
        assert server.stop() == 0
    said = "\n".join(server.lines)
    assert "memory does not suffice for larger steps" in said
    # Version 1 counts them since Linux 4.13; page cache that was dropped is no kill.
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()


@pytest.mark.parametrize("limited", [120, 250, 310], indirect=True)
def test_what_cannot_be_served_is_refused_and_not_killed(limited: tuple[Path, Path]) -> None:
    group, program = limited
    done = subprocess.run(
        [str(program), "-m", "firstlight", "serve", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert "error: Not enough memory: a rank" in done.stderr
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()


@pytest.mark.parametrize("limited", [600], indirect=True)
def test_what_was_asked_for_is_refused_with_its_flags(limited: tuple[Path, Path]) -> None:
    _, program = limited
    flags = ["--max-num-seqs", "512", "--max-batched-tokens", "2048"]
    done = subprocess.run(
        [str(program), "-m", "firstlight", "serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    for advised in ("--max-num-seqs to 8", "--max-batched-tokens to 64"):
        assert advised in done.stderr
