"""Threads that wait in the kernel for a file, where that file lies, and whether its mount answers at all.

The mount is asked by a child that may be lost. Invariant: nothing below a mount that may not answer is
touched by this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from firstlight.base.storage import mount_of, mounts_of, waited_for, waits_of
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import TargetProcess
from firstlight.doctor.case.values_process import StorageWait
from firstlight.doctor.collect.child import run_child
from firstlight.doctor.collect.scene import Collector, Scene

_ASK_S = 1.5
_ASK = "import os, sys; os.statvfs(sys.argv[1])"


def collect_storage(scene: Scene) -> Iterator[Observation]:
    """One of each process that has such a thread."""
    if scene.procfs.root != Path("/proc"):  # a recorded tree: nobody waits there
        return
    asked: dict[str, bool | None] = {}
    for process in scene.target.processes:
        value = _wait_of(scene, process, asked)
        if value is not None:
            source = f"/proc/{process.pid}/task/{value.tid}"
            yield Observation(subject=process.key, source=source, value=value)


def _wait_of(scene: Scene, process: TargetProcess, asked: dict[str, bool | None]) -> StorageWait | None:
    wait = next(iter(waits_of(process.pid)), None)
    if wait is None or not scene.procfs.is_same(process.pid, process.start_ticks):
        return None
    path = waited_for(process.pid, wait.tid) or scene.target.model or ""
    found = mount_of(path, mounts_of(process.pid)) if path.startswith("/") else None
    if found is None:
        return StorageWait(tid=wait.tid, mark=wait.mark, path=path)
    path, mount = found
    if mount.is_remote and mount.point not in asked:
        asked[mount.point] = _answers(process.pid, mount.point)
    return StorageWait(
        tid=wait.tid,
        mark=wait.mark,
        path=path,
        mount=mount.describe(),
        remedy=mount.remedy(),
        answers=asked.get(mount.point),
    )


def _answers(pid: int, point: str) -> bool | None:
    command = [sys.executable, "-I", "-S", "-c", _ASK, f"/proc/{pid}/root{point}"]
    try:
        code = run_child(command, _ASK_S).code
    except OSError:
        return None
    return None if code else code is not None  # an error is an answer to something else


STORAGE = Collector("storage", collect_storage, deadline_s=4.0)
