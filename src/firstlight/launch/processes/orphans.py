"""What the ranks leave when they die: their own children become ours, and none is lost or left a zombie.

Linux only; elsewhere orphans go to the system's first process. Invariant: a process that somebody else in
this program waits for is never taken from him: members of the children's sessions are taken at once; others
only where we are the first process of a container, and after a time in which nobody did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from firstlight.base.proc_stat import read_proc_stat
from firstlight.base.process import ExitCause

_PR_SET_CHILD_SUBREAPER = 36
_STRAY_S = 5.0  # longer than anybody here takes to wait for a child of his own


class Orphan(msgspec.Struct, frozen=True):
    """A grandchild that ended after its parent had."""

    pid: int
    session: int
    cause: ExitCause


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies is ours; where the system cannot, nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(sessions: AbstractSet[int]) -> list[Orphan]:
    """Take note of the dead among our adopted children, those of `sessions` (each led by a child of ours)."""
    found = []
    for pid in _children():
        session = _session_of_zombie(pid)
        if session is None or session not in sessions or pid in sessions:
            continue
        with contextlib.suppress(ChildProcessError):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped == pid:
                cause = ExitCause.from_returncode(os.waitstatus_to_exitcode(status))
                found.append(Orphan(pid, session, cause))
    return found


class Strays:
    """The dead that nobody waits for, where we are a container's first process: what `docker exec` leaves."""

    def __init__(self, pid: int | None = None) -> None:
        self._is_first = (os.getpid() if pid is None else pid) == 1
        self._since_s: dict[int, float] = {}

    def reap(self, now_s: float) -> list[int]:
        """Wait for those that have been dead for some seconds; their pids."""
        if not self._is_first:
            return []
        dead = {pid for pid in _children() if _session_of_zombie(pid) is not None}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in dead}
        reaped = [pid for pid, since_s in self._since_s.items() if now_s - since_s >= _STRAY_S]
        for pid in reaped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return reaped


def _children() -> list[int]:
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids


def _session_of_zombie(pid: int) -> int | None:
    stat = read_proc_stat(pid)
    return stat.session if stat is not None and stat.state == "Z" else None
