"""The supervisor's end of the janitor: starts it, names processes to it, dismisses it.

Invariant: from `start_janitor` on, whatever ends us ends the run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from firstlight.launch import janitor
from firstlight.launch.janitor import remove_tree

_PREFIX = "firstlight-"
_REMOVAL_S = 1.0


class Janitor:
    """Holds the only writing end of the janitor's pipe."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, group: Path | None) -> None:
        self._process = process
        self._fd = fd
        self._group = group
        self._named: set[tuple[int, int]] = set()

    def name(self, pid: int) -> None:
        """A process of the run that the janitor shall end even if it hides the run's token."""
        stat = janitor.read_stat(pid)
        if stat is not None and (pid, stat.start_ticks) not in self._named:
            self._named.add((pid, stat.start_ticks))
            if self._group is not None:
                join_group(self._group, pid)
            self._write(f"{pid} {stat.start_ticks}\n".encode())

    def dismiss(self) -> None:
        """All is tidied up already; returns when the janitor has left."""
        self._write(janitor.DONE)
        os.close(self._fd)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._group is not None:
            remove_group(self._group)

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except BrokenPipeError:
            return  # somebody killed it; the children still have their own belt


def start_janitor(run_id: str, paths: Sequence[Path | str]) -> Janitor:
    """Start it for a run. `paths`: sockets to remove, and links whose target shall take their place."""
    read_fd, write_fd = os.pipe()
    group = make_group(run_id)
    try:
        script = [sys.executable, "-I", "-S", janitor.__file__]
        command = [*script, str(read_fd), run_id, str(group or ""), *map(str, paths)]
        process = subprocess.Popen(
            command, pass_fds=(read_fd,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        os.close(read_fd)
    return Janitor(process, write_fd, group)


# A control group for the processes of a run, where the system lets us make one: all of it ends at one word.
# Version 2 only, as only that has `cgroup.kill`. The group has no controllers of its own, so memory and
# processors are counted where they were. Without the right to make a group everything works as before.


def make_group(run_id: str, proc: Path = Path("/proc")) -> Path | None:
    """A new group below our own; None where there is none, or we may not write."""
    parent = _own_group(proc)
    if parent is None:
        return None
    group = parent / (run_id if run_id.startswith(_PREFIX) else _PREFIX + run_id)
    try:
        group.mkdir()
    except OSError:
        return None
    if (group / "cgroup.kill").exists():
        return group
    remove_group(group)
    return None


def join_group(group: Path, pid: int) -> None:
    """Move a process, whose children to come follow it. What cannot be moved stays where it is."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text(str(pid))


def remove_group(group: Path) -> None:
    """With the groups that its processes have made; one where somebody still runs stays."""
    remove_tree(str(group), _REMOVAL_S)


def _own_group(proc: Path) -> Path | None:
    """Our folder in the version 2 hierarchy."""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
        roots = [words[4] for words in mounts if "-" in words and words[words.index("-") + 1] == "cgroup2"]
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        paths = [line[3:] for line in lines if line.startswith("0::")]
        if roots and paths:
            return Path(roots[0] + paths[0].rstrip("/"))
    return None
