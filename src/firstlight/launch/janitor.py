"""What is left when the supervisor is gone, even by SIGKILL: a few lines that end all that belongs to a run.

It is a script of its own with the reading end of a pipe whose other end only the supervisor holds: the pipe
ends when the supervisor does. Through it the supervisor names the processes it sees, as some overwrite the
environment in which they carry the run's token. Standard library only. Invariant: it ends nothing but
processes that carry the token, that were named to it by pid and start time, that descend from those or share
their session, or that are in the run's own control group, and never an ancestor of its own; and after five
seconds it says what is left of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from typing import NamedTuple

RUN_VARIABLE = "FIRSTLIGHT_RUN_ID"
DONE = b"done\n"
_DEADLINE_S = 5.0
_PAUSE_S = 0.05


class Stat(NamedTuple):
    """What /proc/PID/stat says: fields 3, 4, 6 and 22."""

    state: str
    parent: int
    session: int
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process, or it is dead and not waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    stat = Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
    return None if stat.state in "ZX" else stat


def all_processes() -> dict[int, Stat]:
    """Every living process that we can see."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}


def ancestors(processes: dict[int, Stat], pid: int) -> set[int]:
    """A process and all above it."""
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found


def members(run_id: str, named: dict[int, int], leaders: set[int] | None = None) -> dict[int, Stat]:
    """The living processes of a run: by token, by name (pid and start time), by session and by descent.

    `leaders`: those of `named` that had opened a session; without it: all. The number of another one that is
    gone may have been given to a stranger, who opened a session and went as well: its members are his.
    Never who asks, nor an ancestor of his: whatever carries our words or our token there, it started us.
    """
    processes = all_processes()
    never = ancestors(processes, os.getpid())
    found = {
        pid
        for pid, stat in processes.items()
        if named.get(pid) == stat.start_ticks or _carries_token(pid, run_id)
    } - never
    opened = named.keys() if leaders is None else named.keys() & leaders
    sessions = {pid for pid in opened if pid not in processes or processes[pid].start_ticks == named[pid]}
    while True:
        more = {
            pid
            for pid, stat in processes.items()
            if pid not in found and pid not in never and (stat.parent in found or stat.session in sessions)
        }
        if not more:
            return {pid: processes[pid] for pid in found}
        found |= more


def end_all(
    run_id: str, named: dict[int, int], deadline_s: float = _DEADLINE_S, group: str = ""
) -> list[int]:
    """Kill the processes of a run until none appears any more; those that are left.

    `group`: the control group of the run, if it has one, whose members all end at once.
    """
    give_up_s = time.monotonic() + deadline_s
    if group:
        with contextlib.suppress(OSError), open(f"{group}/cgroup.kill", "w") as file:
            file.write("1")
    while True:
        found = members(run_id, named)
        for pid, stat in found.items():
            now = read_stat(pid)
            if now is not None and now.start_ticks == stat.start_ticks:  # its number is still its own
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not found or time.monotonic() > give_up_s:
            return sorted(found)
        time.sleep(_PAUSE_S)


def remove_tree(group: str, deadline_s: float = _DEADLINE_S) -> bool:
    """Remove a control group with all below it; whether it is gone.

    The kernel refuses while a killed process of it has not quite ended, so it is asked again.
    """
    give_up_s = time.monotonic() + deadline_s
    while True:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if not os.path.isdir(group):
            return True
        if time.monotonic() > give_up_s:
            return False
        time.sleep(_PAUSE_S)


def main() -> int:
    """`janitor.py FD RUN_ID GROUP PATH...`: in the end a path is removed, a link replaced by its target."""
    fd, run_id, group, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all of us; the pipe is our order
    named: dict[int, int] = {}
    rest = b""
    while data := os.read(fd, 4096):
        *lines, rest = (rest + data).split(b"\n")
        if DONE.strip() in lines:  # the supervisor has tidied up itself
            return 0
        named.update((int(line.split()[0]), int(line.split()[1])) for line in lines)
    left = end_all(run_id, named, group=group)
    if group:
        remove_tree(group)
    for path in paths:
        with contextlib.suppress(OSError):
            target = os.path.realpath(path) if os.path.islink(path) else None
            os.unlink(path)
            if target is not None:
                shutil.move(target, path)  # the black boxes leave the memory and stay beside the logs
    if left:
        sys.stderr.write(f"firstlight: processes {left} of run {run_id} could not be ended\n")
    return 1 if left else 0


def _carries_token(pid: int, run_id: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{RUN_VARIABLE}={run_id}".encode() in file.read().split(b"\0")
    except OSError:  # of another user, or just gone
        return False


if __name__ == "__main__":
    sys.exit(main())
