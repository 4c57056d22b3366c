"""Every thread of every process: its state, what it waits in, and the processor time it used.

Taken in both looks: the difference is the only trustworthy use of a processor (`ps` shows the mean of a whole
life). Invariant: what the kernel hides from us is empty, and `is_hidden` says so.
"""

from __future__ import annotations

import contextlib
import platform

from firstlight.doctor.case.target import TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_process import Threads, ThreadState
from firstlight.doctor.collect.scene import Collector, each_process
from firstlight.doctor.servers.procfs import ProcFs, Stat, parse_stat

MAX_THREADS = 512  # a rank with OpenMP on a large machine has some hundred
# Numbers of the system calls that processes wait in.
_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    17: "pread64",
    19: "readv",
    20: "writev",
    23: "select",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    295: "preadv",
    327: "preadv2",
}
_AARCH64 = {
    22: "epoll_pwait",
    25: "fcntl",
    32: "flock",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    69: "preadv",
    72: "pselect6",
    73: "ppoll",
    82: "fsync",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    202: "accept",
    203: "connect",
    206: "sendto",
    207: "recvfrom",
    211: "sendmsg",
    212: "recvmsg",
    242: "accept4",
    260: "wait4",
    286: "preadv2",
}
_NAMES = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})
_FIRST_ARGUMENT_IS_FD = frozenset(
    (
        "read",
        "write",
        "pread64",
        "readv",
        "writev",
        "preadv",
        "preadv2",
        "connect",
        "accept",
        "accept4",
        "sendto",
    )
    + ("sendto", "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync", "epoll_wait", "epoll_pwait")
)


def _threads(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    tids = procfs.tids(process.pid)
    exact: dict[int, tuple[float, float]] = {}
    stats: dict[int, Stat] = {}
    for tid in tids[:MAX_THREADS]:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end while we read
            stats[tid] = parse_stat(procfs.text(process.pid, "task", tid, "stat"))
            used, queued = procfs.text(process.pid, "task", tid, "schedstat").split()[:2]
            exact[tid] = int(used) / 1e9, int(queued) / 1e9
    is_exact = any(used for used, _ in exact.values())  # kernels without the statistic write zeros
    found = tuple(
        _thread(procfs, process.pid, stat, exact.get(tid) if is_exact else None)
        for tid, stat in stats.items()
    )
    sleeping = [thread for thread in found if thread.state in ("S", "D")]
    value = Threads(
        threads=found,
        cpu_source="schedstat" if is_exact else "stat",
        is_hidden=bool(sleeping) and not any(thread.wchan for thread in sleeping),
        num_left_out=max(0, len(tids) - MAX_THREADS),
    )
    return str(procfs.path(process.pid, "task")), value


def _thread(procfs: ProcFs, pid: int, stat: Stat, exact: tuple[float, float] | None) -> ThreadState:
    """`exact`: processor time and time in the queue for a processor."""
    wchan, syscall, fd = "", "", None
    cpu_s, queued_s = exact or (stat.cpu_s, 0.0)
    with contextlib.suppress(OSError):
        wchan = procfs.text(pid, "task", stat.pid, "wchan").strip()
    with contextlib.suppress(OSError, ValueError):
        syscall, fd = parse_syscall(procfs.text(pid, "task", stat.pid, "syscall"))
    return ThreadState(
        tid=stat.pid,
        name=stat.comm,
        state=stat.state,
        cpu_s=cpu_s,
        major_faults=stat.major_faults,
        wchan="" if wchan == "0" else wchan,
        syscall=syscall,
        fd=fd,
        queued_s=queued_s,
    )


def parse_syscall(text: str) -> tuple[str, int | None]:
    """The name of the call a thread is in, and its descriptor: "0 0x3 …" is ("read", 3)."""
    words = text.split()
    if not words or words[0] in ("running", "-1"):
        return ("running" if words[:1] == ["running"] else ""), None
    name = _NAMES.get(int(words[0]), words[0])
    if name in _FIRST_ARGUMENT_IS_FD and len(words) > 1:
        return name, int(words[1], 16) & 0xFFFFFFFF
    return name, None


THREADS = Collector("threads", lambda scene: each_process(scene, "threads", _threads))
