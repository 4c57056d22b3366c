"""A foreign engine ends below a wrapper whose words are those of a server: nothing but the run is ended.

Every wrapper has `firstlight serve` in its arguments and a bystander below it. The engine is the stand-in for
vLLM: it fails, is killed, or the run is stopped.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from firstlight.base.process import start_ticks
from support.stand_in_vllm import CORE, install_stand_in

DEADLINE_S = 60.0
# The program, as a shell script that leaves a bystander in the place where the supervisor will be.
# It ignores the hang-up that a terminal's kernel sends when a window's first process ends.
PROGRAM = """#!/bin/sh
(trap '' HUP; exec sleep 600) &
echo $! > {folder}/bystander.new && mv {folder}/bystander.new {folder}/bystander
echo $$ > {folder}/supervisor.new && mv {folder}/supervisor.new {folder}/supervisor
exec {python} -m firstlight "$@" 2> {folder}/said
"""
# Starts what it is told as a child and waits, as `uv run` and many a launcher do.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.call(sys.argv[{skip}:]))
"""
WRAPPERS = {
    "timeout": ("timeout", "300"),
    "nice": ("nice", "-n", "1"),
    "env": ("env", "A=b"),
    "launcher": (sys.executable, "{folder}/launcher.py"),
    "uv": (sys.executable, "{folder}/uv", "run"),
}
# How a terminal is opened with a command, given another window, and closed.
TERMINALS = {
    "tmux": (
        ("tmux", "-L", "{name}", "new", "-d"),
        ("tmux", "-L", "{name}", "new-window", "-d", "exec sleep 601"),
        ("tmux", "-L", "{name}", "kill-server"),
    ),
    "screen": (
        ("screen", "-S", "{name}", "-dm"),
        ("screen", "-S", "{name}", "-X", "screen", "sleep", "601"),
        ("screen", "-S", "{name}", "-X", "quit"),
    ),
}


class Place(NamedTuple):
    """A folder with the program, and what it is started with."""

    folder: Path
    engine: tuple[str, ...]

    def command(self, *behind: str) -> list[str]:
        """`firstlight serve` with the stand-in."""
        model = self.folder / "model"
        model.mkdir()
        backend = ("--backend", "vllm", "--backend-python", *self.engine, "--served-name", "m")
        return [str(self.folder / "firstlight"), "serve", str(model), "--port", "0", *backend, *behind]

    def pid(self, name: str) -> int:
        """Of the bystander or the supervisor, once it is there."""
        return int(until(lambda: (path := self.folder / name).exists() and path.read_text()))

    def said(self) -> str:
        """What the supervisor has printed."""
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture
def place(tmp_path: Path, python: Path) -> Iterator[Place]:
    program = tmp_path / "firstlight"
    program.write_text(PROGRAM.format(folder=shlex.quote(str(tmp_path)), python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "launcher.py").write_text(LAUNCHER.format(skip=1))
    (tmp_path / "uv").write_text(LAUNCHER.format(skip=2))
    made = Place(tmp_path, (str(python),))
    yield made
    for name in ("supervisor", "bystander"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)


def until(look: Callable[[], object]) -> str:
    """What `look` says, once it says anything."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            if found := look():
                return str(found)
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def filled(words: tuple[str, ...], folder: Path) -> list[str]:
    return [word.format(folder=folder, name=f"fl-{os.getpid()}") for word in words]


def engines(supervisor: int) -> list[psutil.Process]:
    alive = [one for one in psutil.Process(supervisor).children() if is_alive(one.pid)]
    return [one for one in alive if "vllm" in " ".join(one.cmdline())]


def cores(supervisor: int) -> list[psutil.Process]:
    below = psutil.Process(supervisor).children(recursive=True)
    return [one for one in below if is_alive(one.pid) and one.cmdline()[:1] == [CORE]]


def is_alive(pid: int) -> bool:
    return start_ticks(pid) is not None


def is_ready(place: Place) -> bool:
    return "\nready in" in place.said()


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_start_that_fails_ends_only_itself(place: Place, wrapper: str) -> None:
    command = [*filled(WRAPPERS[wrapper], place.folder), *place.command("--", "--fail")]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    assert done.returncode == 6, place.said()  # the wrapper lived to hand it on
    assert is_alive(place.pid("bystander"))


@pytest.mark.parametrize("end", ["crash", "kill", "stop"])
def test_an_engine_that_served_ends_alone(place: Place, end: str) -> None:
    command = [*filled(WRAPPERS["timeout"], place.folder), *place.command()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as wrapper:
        try:
            supervisor = place.pid("supervisor")
            until(lambda: is_ready(place))
            (core,) = cores(supervisor)
            if end == "stop":
                os.kill(supervisor, signal.SIGTERM)
            else:
                number = signal.SIGKILL if end == "kill" else signal.SIGSEGV
                engines(supervisor)[0].send_signal(number)
            assert wrapper.wait(DEADLINE_S) == (0 if end == "stop" else 6), place.said()
        finally:
            wrapper.kill()
    assert not is_alive(core.pid)
    assert is_alive(place.pid("bystander"))


@pytest.mark.parametrize(
    "terminal", [pytest.param(name, marks=pytest.mark.needs(name)) for name in TERMINALS]
)
def test_other_windows_of_a_terminal_live(place: Place, terminal: str) -> None:
    opens, adds, closes = (filled(words, place.folder) for words in TERMINALS[terminal])
    subprocess.run([*opens, *place.command()], check=True, timeout=DEADLINE_S)
    try:
        supervisor = place.pid("supervisor")
        above = psutil.Process(supervisor).parent()
        assert above is not None
        assert "firstlight serve" in " ".join(above.cmdline()).replace(str(place.folder) + "/", "")
        subprocess.run(adds, check=True, timeout=DEADLINE_S)
        window = until(lambda: next((one.pid for one in above.children() if "601" in one.cmdline()), None))
        until(lambda: is_ready(place))
        engines(supervisor)[0].kill()
        until(lambda: not is_alive(supervisor))
        assert is_alive(above.pid)
        assert is_alive(int(window))
        assert is_alive(place.pid("bystander"))
        errors = [line for line in place.said().splitlines() if line.startswith("error: ")]
        assert [error.startswith("error: vllm was ended by SIGKILL") for error in errors] == [True], errors
    finally:
        subprocess.run(closes, check=False, capture_output=True, timeout=DEADLINE_S)
