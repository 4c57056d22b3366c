"""The state of each process, and its memory, I/O and resource limits: what /proc tells of it as a whole.

Invariant: a process that is gone is a finding (`ProcessState` without a state), not a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_process import InputOutput, Limits, Memory, ProcessState
from firstlight.doctor.collect.scene import Collector, Scene, each_process
from firstlight.doctor.servers.procfs import ProcFs, kib_bytes


def collect_state(scene: Scene) -> Iterator[Observation]:
    """State letter, processor time and faults of each process."""
    for process in scene.target.processes:
        yield Observation(
            subject=process.key,
            source=str(scene.procfs.path(process.pid, "stat")),
            value=read_state(scene.procfs, process),
        )


def read_state(procfs: ProcFs, process: TargetProcess) -> ProcessState:
    """An empty state when it has ended."""
    stat = procfs.stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        return ProcessState(state="")
    status: dict[str, str] = {}
    with contextlib.suppress(OSError):
        status = procfs.status(process.pid)
    return ProcessState(
        state=stat.state,
        cpu_s=stat.cpu_s,
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
        num_threads=stat.num_threads,
        parent=stat.parent,
        tracer_pid=int(status.get("TracerPid", "0") or 0),
        caught_signals=_signals(status["SigCgt"]) if "SigCgt" in status else None,
        namespace_pids=tuple(int(word) for word in status.get("NSpid", "").split()),
    )


def _signals(mask: str) -> tuple[int, ...]:
    bits = int(mask, 16)
    return tuple(number + 1 for number in range(64) if bits >> number & 1)


def _input_output(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    pairs = (line.split(": ") for line in procfs.text(process.pid, "io").splitlines())
    fields = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    names = ("rchar", "wchar", "read_bytes", "write_bytes")
    value = InputOutput(**{name: fields.get(name, 0) for name in names})
    return str(procfs.path(process.pid, "io")), value


def _memory(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    status = procfs.status(process.pid)
    value = Memory(
        anonymous_bytes=kib_bytes(status.get("RssAnon", "")),
        file_bytes=kib_bytes(status.get("RssFile", "")),
        shared_bytes=kib_bytes(status.get("RssShmem", "")),
        locked_bytes=kib_bytes(status.get("VmLck", "")),
        swapped_bytes=kib_bytes(status.get("VmSwap", "")),
        virtual_bytes=kib_bytes(status.get("VmSize", "")),
    )
    return str(procfs.path(process.pid, "status")), value


def collect_limits(scene: Scene) -> Iterator[Observation]:
    """Limits, with what is used of them."""
    threads_of: dict[int, int] = {}
    for pid in scene.procfs.pids():
        stat = scene.procfs.stat(pid)
        with contextlib.suppress(OSError):
            uid = os.stat(scene.procfs.path(pid)).st_uid
            threads_of[uid] = threads_of.get(uid, 0) + (stat.num_threads if stat else 0)

    def read(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
        return str(procfs.path(process.pid, "limits")), _limits(procfs, process, threads_of)

    yield from each_process(scene, "limits", read)


def _limits(procfs: ProcFs, process: TargetProcess, threads_of: dict[int, int]) -> Limits:
    soft: dict[str, int | None] = {}
    for line in procfs.text(process.pid, "limits").splitlines()[1:]:
        name, rest = line[:26].strip(), line[26:].split()
        soft[name] = int(rest[0]) if rest and rest[0].isdigit() else None
    num_open: int | None = None
    with contextlib.suppress(PermissionError):
        num_open = len(procfs.names(process.pid, "fd"))
    stat = procfs.stat(process.pid)
    return Limits(
        max_open_files=soft.get("Max open files"),
        num_open_files=num_open,
        max_processes=soft.get("Max processes"),
        num_user_threads=None if process.uid is None else threads_of.get(process.uid),
        max_locked_bytes=soft.get("Max locked memory"),
        max_address_bytes=soft.get("Max address space"),
        num_threads=stat.num_threads if stat else 0,
    )


STATE = Collector("process", collect_state)
INPUT_OUTPUT = Collector("io", lambda scene: each_process(scene, "io", _input_output))
MEMORY = Collector("memory", lambda scene: each_process(scene, "memory", _memory))
LIMITS = Collector("limits", collect_limits, is_dynamic=False)
