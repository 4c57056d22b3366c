"""Pipes, sockets and standard streams of each process, and who is at the other end.

Invariant: a process whose descriptors we may not see is counted, so that "nobody reads this pipe" is never
said for want of rights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN, TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_host import PipeEnds, Pipes
from firstlight.doctor.case.values_process import Descriptor, Descriptors
from firstlight.doctor.collect.scene import Collector, Scene, each_process
from firstlight.doctor.servers.procfs import ProcFs

MAX_DESCRIPTORS = 1024
_INODE = re.compile(r"(pipe|socket):\[(\d+)\]")


def _descriptors(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    links = list(procfs.links(process.pid))
    shown = [_descriptor(procfs, process.pid, fd, link) for fd, link in sorted(links)]
    kept = tuple(d for d in shown if d.kind in ("pipe", "socket") or d.fd < 3)[:MAX_DESCRIPTORS]
    return str(procfs.path(process.pid, "fd")), Descriptors(open=kept, num_open=len(links))


def _descriptor(procfs: ProcFs, pid: int, fd: int, link: str) -> Descriptor:
    match = _INODE.fullmatch(link)
    if match is None:
        return Descriptor(fd=fd, kind="file" if link.startswith("/") else "other", target=link)
    mode = procfs.descriptor_mode(pid, fd) if match[1] == "pipe" else ""
    return Descriptor(fd=fd, kind=match[1], target=link, inode=int(match[2]), mode=mode)


def collect_pipes(scene: Scene) -> Iterator[Observation]:
    """Every pipe that the target holds, with all holders on this machine that we may see."""
    wanted: set[int] = set()
    for process in scene.target.processes:
        wanted |= _pipes_of(scene.procfs, process.pid).keys()
    holders: dict[tuple[int, str], dict[str, None]] = {}
    num_hidden = 0
    for pid in scene.procfs.pids():
        try:
            held = _pipes_of(scene.procfs, pid, is_strict=True)
        except PermissionError:
            num_hidden += 1
            continue
        key = "doctor" if pid == os.getpid() else scene.target.key_of(pid)
        for inode in held.keys() & wanted:
            modes = "".join(scene.procfs.descriptor_mode(pid, fd) for fd in held[inode])
            for letter in set(modes):
                holders.setdefault((inode, letter), {})[key] = None
    ends = tuple(
        PipeEnds(
            inode=inode,
            readers=tuple(holders.get((inode, "r"), ())),
            writers=tuple(holders.get((inode, "w"), ())),
        )
        for inode in sorted(wanted)
    )
    yield Observation(
        subject=RUN, source=f"{scene.procfs.root}/*/fd", value=Pipes(pipes=ends, num_hidden=num_hidden)
    )


def _pipes_of(procfs: ProcFs, pid: int, *, is_strict: bool = False) -> dict[int, list[int]]:
    """Inode to descriptors. `is_strict`: raises `PermissionError` where we may not look."""
    found: dict[int, list[int]] = {}
    try:
        for fd, link in procfs.links(pid):
            match = _INODE.fullmatch(link)
            if match is not None and match[1] == "pipe":
                found.setdefault(int(match[2]), []).append(fd)
    except PermissionError:
        if is_strict:
            raise
    except OSError:
        pass  # it ended meanwhile
    return found


DESCRIPTORS = Collector(
    "descriptors", lambda scene: each_process(scene, "descriptors", _descriptors), deadline_s=3.0
)
PIPES = Collector("pipes", collect_pipes, deadline_s=5.0, is_dynamic=False)
