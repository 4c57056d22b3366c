"""Scenes for the doctor's tests: real children in real trouble, recorded /proc trees, made-up cases."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from firstlight.base.blackbox.reader import NO_PLACE, Box, Collective, Odometer, PhaseRecord, Place
from firstlight.doctor.case.evidence import Case, Observation, number
from firstlight.doctor.case.target import Engine, Role, Target, TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.procfs import ProcFs

DEADLINE_S = 10.0
_NO_COLLECTIVES = Collective("", 0), Collective("", 0)
V = TypeVar("V", bound=Value)


@contextlib.contextmanager
def child(code: str, *, ready: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A Python child in its own session that runs `code`; `ready`: a line it prints when it is prepared."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if ready:
            assert process.stdout.readline().strip().decode() == ready
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for a bounded time."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come to pass"
        time.sleep(0.01)


def in_state(pid: int, letters: str) -> Callable[[], bool]:
    """Whether a process is in one of these states."""

    def check() -> bool:
        stat = ProcFs().stat(pid)
        return stat is not None and stat.state in letters

    return check


def living(pid: int, key: str, role: Role = Role.RANK, rank: int | None = None) -> TargetProcess:
    """A process that runs, under a name of our choice."""
    stat = ProcFs().stat(pid)
    assert stat is not None
    return TargetProcess(
        key=key,
        pid=pid,
        start_ticks=stat.start_ticks,
        parent=stat.parent,
        session=stat.session,
        role=role,
        rank=rank,
        uid=os.getuid(),
    )


def made_up(key: str, pid: int, role: Role = Role.RANK, rank: int | None = None) -> TargetProcess:
    """A process that exists in a case only."""
    return TargetProcess(key=key, pid=pid, start_ticks=1, parent=1, session=1, role=role, rank=rank)


def target(*processes: TargetProcess, **fields: object) -> Target:
    return Target(**{"engine": Engine.UNKNOWN, "processes": processes, **fields})  # type: ignore[arg-type]


def look(found: Target, collectors: Sequence[Collector], num_looks: int = 1, interval_s: float = 0.3) -> Case:
    """A case from real looks."""
    return examine(Scene(found), collectors, num_looks=num_looks, interval_s=interval_s)


def the(found: Case, kind: type[V], subject: str, look: int | None = None) -> V:
    """The value of this kind, which must be there."""
    value = found.of(kind, subject, look)
    assert value is not None, found.failures(subject=subject)
    return value


def encode_case(found: Case) -> bytes:
    """A case as JSON."""
    return msgspec.json.encode(found)


def decode_case(data: bytes) -> Case:
    """Raises `msgspec.DecodeError` when the data is no case of this version."""
    return msgspec.json.decode(data, type=Case)


def case(found: Target, seen: Sequence[tuple[int, str, Value]], seconds: float = 2.0) -> Case:
    """A case from (look, subject, value); the second look comes `seconds` after the first."""
    items = [
        (look, 1000.0 + look * seconds, Observation(subject=subject, source="made up", value=value))
        for look, subject, value in seen
    ]
    return Case(target=found, evidence=number(items))


def box(
    rank: int | None = 0,
    *,
    phase: str = "weights",
    number: int = 3,
    odometer: Odometer | None = None,
    step: int = 0,
    requests: tuple[int, int] = (0, 0),
    collectives: tuple[Collective, Collective] = _NO_COLLECTIVES,
    operator: Place = NO_PLACE,
) -> Box:
    """A box of a process that began its phase at the time 900 of `case`'s clock."""
    record = PhaseRecord(number=number, name=phase, start_s=900.0, detail="", odometer=odometer or Odometer())
    return Box(
        role="rank",
        rank=rank,
        run_id="run",
        pid=10,
        start_ticks=1,
        made_wall_s=0.0,
        made_monotonic_s=0.0,
        phases=(record,),
        step=step,
        running=requests[0],
        waiting=requests[1],
        pages_used=0,
        entered=collectives[0],
        left=collectives[1],
        operator=operator,
        events=(),
        notes=(),
    )


def tree(root: Path, files: dict[str, str]) -> Path:
    """Files below a folder, as a recorded system has them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def recorded(
    pid: int, command: Sequence[str], comm: str, *, parent: int = 1, **fields: str
) -> dict[str, str]:
    """The files of one process in a recorded /proc: `state`, `session`, `environ`, `uid` may be given."""
    session, state = fields.get("session", str(pid)), fields.get("state", "S")
    numbers = "0 -1 0 100 0 7 0 250 50 0 0 20 0 4 0"
    return {
        f"{pid}/stat": f"{pid} ({comm}) {state} {parent} {pid} {session} 0 {numbers} {1000 + pid} 0 0",
        f"{pid}/cmdline": "".join(f"{argument}\0" for argument in command),
        f"{pid}/environ": fields.get("environ", ""),
        f"{pid}/status": f"Name:\t{comm}\nUid:\t{fields.get('uid', '1000')}\t0\t0\t0\n",
    }
