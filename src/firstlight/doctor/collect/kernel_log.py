"""The kernel's log, where it is shown to us: driver errors of GPUs, and processes killed for want of memory.

Most systems show it to root only, and that refusal is evidence too. Invariant: it is read without waiting and
nothing is taken out of it: every reader of /dev/kmsg has a place of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_device import KernelLog
from firstlight.doctor.collect.scene import Collector, Scene

_WANTED = re.compile(
    r"NVRM:|\bXid\b|\bSXid\b|nvidia-nvswitch|fallen off the bus|AER:|PCIe Bus Error"
    r"|Out of memory: Killed|oom-kill:|Memory cgroup out of memory|blocked for more than|segfault at"
)
_RECORD = 8192
_MAX_RECORDS = 100_000
MAX_LINES = 60


def collect_kernel_log(scene: Scene) -> Iterator[Observation]:
    """The last lines that matter."""
    path = scene.devices / "kmsg"
    lines = [line for record in _records(str(path)) if _WANTED.search(line := _words(record))]
    value = KernelLog(lines=tuple(hide_in_text(line)[:300] for line in lines[-MAX_LINES:]))
    yield Observation(subject=HOST, source=str(path), value=value)


def _records(path: str) -> Iterator[str]:
    """What is there now. A real log gives one record each read and then would block; a file simply ends."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(_MAX_RECORDS):
            try:
                data = os.read(handle, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # overwritten while we read: go on with the oldest that is left
                continue
            if not data:
                return
            yield from data.decode("utf-8", "replace").splitlines()
    finally:
        os.close(handle)


def killed_for_memory(pid: int, since_s: float, path: Path = Path("/dev/kmsg")) -> str | None:
    """The kernel's line on a process that it killed for want of memory; None if there is none, or no right.

    `since_s`: not earlier than this, in seconds since boot, as numbers of processes come back.
    """
    wanted = re.compile(rf"\bKilled process {pid} ")
    try:
        for record in _records(str(path)):
            line = _words(record)
            if wanted.search(line) and (_seconds(record) or math.inf) >= since_s:
                return line
    except OSError:
        return None
    return None


def _words(record: str) -> str:
    """ "6,1234,5678000,-;NVRM: Xid …" as "[5.678] NVRM: Xid …"."""
    seconds = _seconds(record)
    words = record.partition(";")[2] or record
    return words if seconds is None else f"[{seconds:.3f}] {words}"


def _seconds(record: str) -> float | None:
    """Since boot."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else None


KERNEL_LOG = Collector("kernel-log", collect_kernel_log, deadline_s=3.0, is_dynamic=False)
