"""What a simulated patient is: a real process tree with a real fault, and the ward that ends all of it.

Used by every `kinds_*` file and by `run`. A kind's `start` makes the fault happen and says when; nothing of a
kind's name, expectation or file reaches the doctor. Invariant: leaving a `Ward` leaves no process of the
patient behind, and says so if it could not.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from firstlight.base.blackbox.store import drop_boxes
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import Target

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
INJECTED = HERE / "injected"
TOKEN = "XDG_SESSION_COOKIE"  # a variable that every desktop has: it tells the doctor nothing
DEADLINE_S = 60.0
_END_DEADLINE_S = 10.0


class Unavailable(Exception):
    """This machine cannot make such a patient; the text says why. Listed, never silently left out."""


@dataclass(frozen=True)
class Patient:
    """A fault that has happened. `find` discovers the target anew; `arguments` are those of the command."""

    find: Callable[[], Target]
    arguments: tuple[str, ...]
    fault_s: float  # time.monotonic()
    note: str = ""  # what was drawn for this seed
    as_uid: int | None = None  # who examines it
    subject: str | None = None  # who must be named, where it was drawn
    own_verdict: Callable[[], str] | None = None  # of the supervisor; empty until it has one


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of patient. `causes`: the right first verdict; more than one only where `why` says so."""

    name: str
    what: str
    start: Callable[[Ward], Patient]
    causes: frozenset[str]
    conditions: frozenset[str]
    subject: str | None = None  # the process that must be named
    why: str = ""
    settle_s: float = 1.0  # from the fault to the first look
    is_quick: bool = False  # part of the short form
    is_steady: bool = False  # healthy for as long as it is looked at: may be examined again and again
    holds: Callable[[Case], bool] | None = None  # whether the evidence shows the fault that we claim

    @property
    def is_healthy(self) -> bool:
        """Whether a verdict of stuck or dead is a false alarm."""
        return not self.conditions & {"stuck", "dead"}


@dataclass
class Ward:
    """The place of one patient: a folder, chance, and the end of everything that was started in it."""

    kind: str
    seed: int
    models: Path
    is_left_to_us: bool = False  # the supervisor judges alone, at its usual speed
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __enter__(self) -> Self:
        self.random = random.Random(f"{self.kind} {self.seed}")
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="w-")))
        self.folder.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.end_all()
        for run_dir in self.folder.glob("firstlight-*"):
            drop_boxes(run_dir)  # in shared memory; who would have removed them was ended too
        self.stack.close()
        assert not left, f"processes {left} could not be ended"

    def environment(self, **variables: str) -> dict[str, str]:
        """For a child: ours, its mark by which the ward ends it, our sources."""
        path = os.pathsep.join((str(SOURCES), str(SOURCES.parent / "tests")))
        # Run directories and boxes of other users' runs are none of this patient's.
        own = {TOKEN: self.token, "PYTHONPATH": path, "TMPDIR": str(self.folder), "HF_HUB_OFFLINE": "1"}
        return {**os.environ, **own, **variables}

    def spawn(self, command: list[str], variables: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process of the patient in a session of its own."""
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        process = subprocess.Popen(command, env=self.environment(**variables), **options)
        self.stack.callback(lambda: process.poll() if process.poll() is not None else process.wait(5))
        return process

    def python(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start our interpreter."""
        variables = options.pop("variables", {})
        return self.spawn([sys.executable, *arguments], variables, **options)

    def end_all(self) -> list[int]:
        """Kills everything that carries the mark; what is left after a deadline."""
        give_up_s = time.monotonic() + _END_DEADLINE_S
        while left := list(marked(self.token)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > give_up_s:
                return left
            time.sleep(0.02)
        return []


def marked(token: str) -> Iterator[int]:
    """The living processes that were started with this mark."""
    mark = f"{TOKEN}={token}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S, every_s: float = 0.01) -> Any:
    """Wait for something to be true; its value."""
    give_up_s = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up_s:
            raise AssertionError(f"{what} did not come to pass within {seconds:.0f} s")
        time.sleep(every_s)


def until_still(*pids: int, for_s: float = 0.7) -> None:
    """Waits until these processes have not used the processor for a while: they wait for something."""
    last: dict[int, str] = {}
    since_s = time.monotonic()

    def are_still() -> bool:
        nonlocal last, since_s
        now = {pid: _processor_time(pid) for pid in pids}
        if now != last:
            last, since_s = now, time.monotonic()
        return time.monotonic() - since_s >= for_s

    until(are_still, f"the waiting of {pids}", every_s=0.05)


def _processor_time(pid: int) -> str:
    """User and system time, as /proc writes it; empty when it has ended."""
    with contextlib.suppress(OSError):
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    return ""


def is_root() -> bool:
    """Whether we may do what only root may."""
    return os.geteuid() == 0


def need_root(what: str) -> None:
    """Raises `Unavailable` for everybody else."""
    if not is_root():
        raise Unavailable(f"{what} needs root")
