"""Rows of made-up cases: processes that sleep or work, their stacks and boxes, in both looks."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN, Engine, Role, Target, TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    Frame,
    LogTail,
    ProcessState,
    PythonStacks,
    StackThread,
    Threads,
    ThreadState,
)
from support.doctor_scenes import box, case, made_up, target

Rows = list[tuple[int, str, Value]]


def both(key: str, value: Value) -> Rows:
    """The same in both looks."""
    return [(0, key, value), (1, key, value)]


def thread(tid: int, **fields: object) -> ThreadState:
    values = {
        "name": "t",
        "state": "S",
        "cpu_s": 1.0,
        "major_faults": 0,
        "wchan": "futex_wait_queue",
        **fields,
    }
    return ThreadState(tid=tid, **values)  # type: ignore[arg-type]


def asleep(key: str, pid: int, **fields: object) -> Rows:
    """A process whose main thread uses no processor between the looks."""
    threads = Threads(threads=(thread(pid, **fields),), cpu_source="schedstat")
    return [*both(key, ProcessState(state="S", num_threads=1)), *both(key, threads)]


def busy(key: str, pid: int, cores: float = 1.0, queued: float = 0.0) -> Rows:
    rows: Rows = []
    for look in (0, 1):
        state = thread(pid, state="R", wchan="", cpu_s=1.0 + look * 2.0 * cores, queued_s=look * 2.0 * queued)
        rows.append((look, key, Threads(threads=(state,), cpu_source="schedstat")))
        rows.append((look, key, ProcessState(state="R", num_threads=1)))
    return rows


def stack(key: str, *frames: tuple[str, str, str], tid: int = 10, **fields: bool) -> Rows:
    """One thread's stack in both looks; a frame is (file, function, source)."""
    return both(key, PythonStacks(threads=(stack_thread(tid, *frames, **fields),), tool="py-spy"))


def stack_thread(tid: int, *frames: tuple[str, str, str], **fields: bool) -> StackThread:
    shown = tuple(Frame(file=file, function=name, line=7, text=text) for file, name, text in frames)
    flags = {"is_active": False, "owns_gil": False, **fields}
    return StackThread(tid=tid, name=f"thread-{tid}", frames=shown, **flags)


def boxed(key: str, rank: int | None = 0, **fields: object) -> Rows:
    seen = BlackBoxSeen(path="box", box=box(rank, **fields), is_alive=True, age_s=20.0)  # type: ignore[arg-type]
    return both(key, seen)


def one_rank(*rows: Sequence[tuple[int, str, Value]], **fields: object) -> Case:
    """A native server with an api process and one rank."""
    rank, api = made_up("rank-0", 10, rank=0), made_up("api", 20, Role.API)
    found = native(rank, api, **{"expected_ranks": 1, **fields})
    return case(found, [row for part in rows for row in part])


def two_ranks(*rows: Sequence[tuple[int, str, Value]], **fields: object) -> Case:
    ranks = (made_up("rank-0", 10, rank=0), made_up("rank-1", 11, rank=1))
    found = native(*ranks, **{"expected_ranks": 2, **fields})
    return case(found, [row for part in rows for row in part])


def native(*processes: TargetProcess, **fields: object) -> Target:
    return target(*processes, **{"engine": Engine.NATIVE, "run_dir": "/run/x", **fields})


def log(*lines: str) -> Rows:
    return [(0, RUN, LogTail(path="x.log", size_bytes=1, modified_wall_s=900.0, lines=lines))]
