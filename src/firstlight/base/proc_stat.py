"""What `/proc/PID/stat` says of a process. Used wherever a process is named for good, or watched cheaply.

Standard library only, as black boxes are opened before anything else is imported. The janitor, a script that
imports nothing of ours, and the doctor, which reads recorded trees too, have their own. Linux only.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple


class ProcStat(NamedTuple):
    """Fields 3, 6, 12 and 22. `start_ticks`: clock ticks since the machine started."""

    state: str
    session: int
    major_faults: int
    start_ticks: int


def read_proc_stat(pid: int) -> ProcStat | None:
    """None if there is no such process, or off Linux. A zombie has the state "Z"."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program comes second, in parentheses, and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields:  # it ended while it was read
        return None
    return ProcStat(fields[0].decode(), int(fields[3]), int(fields[9]), int(fields[19]))


def launched_s() -> float:
    """When this process was started, on the monotonic clock; off Linux this moment.

    Exact to a clock tick (10 ms). A crowded machine may take seconds from there to our first line.
    """
    stat = read_proc_stat(os.getpid())
    now_s = time.monotonic()
    if stat is None:
        return now_s
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return now_s - max(0.0, age_s)
