"""Locks on files that the target holds or waits for, and whoever else has the same file open.

A flock belongs to an open file, not to a process: its taker may be dead while a child that inherited the
descriptor still holds it. So the holders are those whose fdinfo shows the lock, and /proc/locks is asked for
who waits. Invariant: a path is named only where a descriptor of the target leads to it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import FileLock, FileLocks
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.procfs import ProcFs

_LINE = re.compile(
    r"^(?:lock:\s*)?(\d+): (-> )?\s*(FLOCK|POSIX|OFDLCK)\s+\S+\s+(\S+)\s+(-?\d+)\s+[0-9a-f]+:[0-9a-f]+:(\d+)"
)


@dataclass(frozen=True)
class LockLine:
    """One line of /proc/locks, or of an fdinfo."""

    number: int
    is_waiting: bool
    kind: str
    mode: str
    pid: int
    inode: int


def parse_lock(line: str) -> LockLine | None:
    """None for leases and whatever else stands there."""
    match = _LINE.match(line.strip())
    if match is None:
        return None
    return LockLine(int(match[1]), bool(match[2]), match[3], match[4], int(match[5]), int(match[6]))


def collect_locks(scene: Scene) -> Iterator[Observation]:
    """The locks that concern the target."""
    procfs = scene.procfs
    lines = [found for line in procfs.text("locks").splitlines() if (found := parse_lock(line))]
    paths: dict[int, str] = {}
    for process in scene.target.processes:
        paths.update(open_files(procfs, process.pid))
    mine = {process.pid for process in scene.target.processes}
    wanted = {line.inode for line in lines if line.pid in mine or line.inode in paths}
    wanted |= {inode for inode, path in paths.items() if path.endswith("lock")}
    holders = lock_holders(procfs, {paths[inode]: inode for inode in wanted if inode in paths})
    held = {line.inode: line for line in lines if not line.is_waiting}
    locks = [
        _lock(scene, inode, held.get(inode), paths.get(inode, ""), holders.get(inode, []), lines)
        for inode in sorted(wanted)
        if inode in held or holders.get(inode)
    ]
    source = f"{procfs.path('locks')}, {procfs.root}/*/fdinfo"
    yield Observation(subject=RUN, source=source, value=FileLocks(locks=tuple(locks)))


def _lock(
    scene: Scene,
    inode: int,
    held: LockLine | None,
    path: str,
    holders: list[tuple[int, LockLine]],
    lines: list[LockLine],
) -> FileLock:
    line = held or holders[0][1]
    pids = dict.fromkeys(pid for pid, _ in holders)
    through = [pid for pid in pids if pid != line.pid]
    taker_lives = scene.procfs.stat(line.pid) is not None
    holder = line.pid if taker_lives or not through else through[0]
    waiters = dict.fromkeys(other.pid for other in lines if other.is_waiting and other.inode == inode)
    return FileLock(
        kind=line.kind,
        mode=line.mode,
        holder=scene.target.key_of(holder),
        holder_pid=holder,
        taker_pid=line.pid,
        is_taker_alive=taker_lives,
        inode=inode,
        path=path,
        held_through=tuple(scene.target.key_of(pid) for pid in pids),
        waiters=tuple(scene.target.key_of(pid) for pid in waiters),
    )


def open_files(procfs: ProcFs, pid: int) -> dict[int, str]:
    """Inode to path of the regular files that a process has open; empty where we may not look."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for fd, link in procfs.links(pid):
            if link.startswith("/") and not link.startswith("/dev/"):
                with contextlib.suppress(OSError):
                    found[os.stat(procfs.path(pid, "fd", fd)).st_ino] = link
    return found


def lock_holders(procfs: ProcFs, inodes: dict[str, int]) -> dict[int, list[tuple[int, LockLine]]]:
    """Of each file, who has it open with a lock on that descriptor."""
    found: dict[int, list[tuple[int, LockLine]]] = {}
    for pid in procfs.pids() if inodes else ():
        with contextlib.suppress(OSError):
            for fd, link in procfs.links(pid):
                line = _locked(procfs, pid, fd) if link in inodes else None
                if line is not None:
                    found.setdefault(inodes[link], []).append((pid, line))
    return found


def _locked(procfs: ProcFs, pid: int, fd: int) -> LockLine | None:
    with contextlib.suppress(OSError):
        for text in procfs.text(pid, "fdinfo", fd).splitlines():
            if text.startswith("lock:") and (line := parse_lock(text)) is not None:
                return line
    return None


LOCKS = Collector("file-locks", collect_locks, deadline_s=4.0)
