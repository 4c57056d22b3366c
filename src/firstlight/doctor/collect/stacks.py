"""Python stacks of the processes that matter, taken by py-spy from outside and without stopping them.

A rank in a live collective is never stopped. Invariant: a stack that was not taken is `Failed` evidence with
py-spy's own reason.
"""

from __future__ import annotations

import linecache
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import Role, TargetProcess
from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_process import Frame, PythonStacks, StackThread
from firstlight.doctor.collect.child import run_child
from firstlight.doctor.collect.scene import Collector, Scene, failed
from firstlight.doctor.collect.stacks_otherwise import otherwise
from firstlight.doctor.servers.identity import is_helper

MAX_PROCESSES = 32
MAX_THREADS, MAX_FRAMES = 64, 60
SOURCE_FRAMES = 3
_DEADLINE_S = 4.0
_NOT_PYTHON = (Role.COMPILER, Role.JANITOR)
_REFUSALS = ("permission denied", "operation not permitted", "eperm", "not allowed")


def collect_stacks(scene: Scene) -> Iterator[Observation]:
    """Of all Python processes of the target."""
    if not scene.options.with_stacks:
        return
    wanted = [p for p in scene.target.processes if p.role not in _NOT_PYTHON and not is_helper(p.command)]
    refused = []
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="py-spy") as pool:
        found = pool.map(lambda process: (process, _stack(scene, process)), wanted[:MAX_PROCESSES])
        for process, seen in found:
            if isinstance(seen.value, Failed) and seen.value.is_refused and scene.options.with_help:
                refused.append((process, seen.value))
            else:
                yield seen
    if refused:
        yield from otherwise(scene, refused)


def find_tool() -> str | None:
    """py-spy beside our own interpreter, or on the path."""
    beside = Path(sys.executable).parent
    return shutil.which("py-spy", path=beside) or shutil.which("py-spy")


def _stack(scene: Scene, process: TargetProcess) -> Observation:
    source = "py-spy dump --nonblocking --json"
    tool = find_tool()
    if tool is None:
        missing = Failed(collector="stacks", reason="py-spy is not installed", is_refused=True)
        return Observation(subject=process.key, source=source, value=missing)
    command = [tool, "dump", "--pid", str(process.pid), "--nonblocking", "--json"]
    if not scene.procfs.is_same(process.pid, process.start_ticks):
        gone = Failed(collector="stacks", reason="the process has ended", is_gone=True)
        return Observation(subject=process.key, source=source, value=gone)
    try:
        result = run_child(command, _DEADLINE_S)
    except OSError as error:  # not ours to execute
        return Observation(subject=process.key, source=source, value=failed("stacks", error))
    if result.code == 0:
        try:
            stacks = parse_dump(result.output, process.pid)
            return Observation(subject=process.key, source=source, value=stacks)
        except (msgspec.DecodeError, TypeError, ValueError, KeyError) as error:
            reason = f"py-spy's answer was not understood: {error}"
    else:
        reason = result.errors.strip()[:500] or f"py-spy ended with {result.code}"
    is_refused = any(word in reason.lower() for word in _REFUSALS)
    value = Failed(collector="stacks", reason=reason, is_timeout=result.code is None, is_refused=is_refused)
    return Observation(subject=process.key, source=source, value=value)


def parse_dump(text: str, main_tid: int = 0) -> PythonStacks:
    """py-spy's JSON, the main thread first. Raises `ValueError` or `msgspec.DecodeError` for other things."""
    rows = msgspec.json.decode(text)
    if not isinstance(rows, list):
        raise ValueError("no list of threads")
    rows.sort(key=lambda row: row.get("os_thread_id") != main_tid)
    return PythonStacks(threads=tuple(_thread(row) for row in rows[:MAX_THREADS]), tool="py-spy")


def _thread(row: dict[str, Any]) -> StackThread:
    frames = row.get("frames") or []
    return StackThread(
        tid=int(row.get("os_thread_id") or 0),
        name=str(row.get("thread_name") or ""),
        is_active=bool(row.get("active")),
        owns_gil=bool(row.get("owns_gil")),
        frames=tuple(
            Frame(
                function=str(frame.get("name")),
                file=str(frame.get("short_filename") or frame.get("filename") or ""),
                line=int(frame.get("line") or 0),
                text=_source(frame) if depth < SOURCE_FRAMES else "",
            )
            for depth, frame in enumerate(frames[:MAX_FRAMES])
        ),
    )


def _source(frame: dict[str, Any]) -> str:
    """The line of source a frame is in, so that a wait for a lock can be told from work."""
    path, line = str(frame.get("filename") or ""), int(frame.get("line") or 0)
    if not path.startswith("/") or not path.endswith(".py"):
        return ""
    return linecache.getline(path, line).strip()[:160]


STACKS = Collector("stacks", collect_stacks, deadline_s=9.0)
