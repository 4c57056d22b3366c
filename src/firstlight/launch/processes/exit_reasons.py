"""What is written down of each child that has ended, at once and for whoever asks later.

Invariant: a disk that is full does not keep the supervisor from its work.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import msgspec

from firstlight.base.exit_notes import ExitNote, write_exit_note
from firstlight.base.process import ExitCause
from firstlight.doctor.collect.cgroup import folders
from firstlight.doctor.collect.kernel_log import killed_for_memory

_FILES = {1: "memory.oom_control", 2: "memory.events"}


class Obituaries:
    """Of the children of one run; made before the first of them starts."""

    def __init__(self, run_dir: str, oom: OomWatch | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._oom = oom or OomWatch()
        self._told: dict[str, int] = {}

    def told(self, name: str, number: int) -> None:
        """We have sent this signal."""
        self._told[name] = number

    def write(self, name: str, pid: int, cause: ExitCause) -> bool | None:
        """Write down the end of a child; whether it was for want of memory, None if that is not known."""
        is_killed = cause.signal == signal.SIGKILL
        was_ours = is_killed and self._told.get(name) == signal.SIGKILL
        judgement = Judgement(False, "we killed it") if was_ours else self._oom.judge(cause, pid)
        note = ExitNote(
            name=name,
            pid=pid,
            code=cause.code,
            signal=cause.signal,
            told=name in self._told and (was_ours or not is_killed),  # asked to leave, and killed by another
            time_s=time.time(),
            is_oom=judgement.is_oom,
            oom_evidence=judgement.evidence,
        )
        with contextlib.suppress(OSError):
            write_exit_note(self._run_dir, note)
        return judgement.is_oom


# Whether the kernel ended a child for want of memory: its own counters, before and after. Yes only if the
# group counted a kill that no other child has used up, no only if a counter that covers the child did not
# move; else not known.


class OomCounters(msgspec.Struct, frozen=True):
    """Kills for want of memory so far, in our group and on this machine. None: not told here."""

    group: int | None = None
    host: int | None = None
    group_file: str = ""


class Judgement(msgspec.Struct, frozen=True):
    """Whether it was, and by what one can see it."""

    is_oom: bool | None
    evidence: str = ""


def judge(cause: ExitCause, before: OomCounters, after: OomCounters, used_up: int = 0) -> Judgement:
    """Of a child that we did not kill. `used_up`: kills since `before` that explain other children."""
    if cause.signal != signal.SIGKILL:
        return Judgement(False)
    in_group = _risen(before.group, after.group)
    on_host = _risen(before.host, after.host)
    if in_group is not None and in_group > used_up:
        return Judgement(True, f"oom_kill in {after.group_file} rose by {in_group} since the start")
    if on_host == 0:
        return Judgement(False, "oom_kill in /proc/vmstat has not moved since the start")
    if in_group is not None and Path(after.group_file).name == _FILES[2]:
        return Judgement(False, f"oom_kill in {after.group_file} has not moved")
    if on_host is not None:
        evidence = f"oom_kill in /proc/vmstat, which counts the whole machine, rose by {on_host}"
        return Judgement(None, f"{evidence} since the start")
    return Judgement(None)


class OomWatch:
    """Judges one child after the other against the counters at its making."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._before = read_counters(proc, cgroups)
        self._since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 1
        self._used_up = 0

    def judge(self, cause: ExitCause, pid: int) -> Judgement:
        """Of a child that has just ended, and that we did not kill."""
        judgement = judge(cause, self._before, read_counters(self._proc, self._cgroups), self._used_up)
        # Counters may be of another group than the child's; the kernel's log names the process, to root.
        word = killed_for_memory(pid, self._since_s) if cause.signal == signal.SIGKILL else None
        if word is not None:
            judgement = Judgement(True, f"the kernel's log: {word[:200]}")
        self._used_up += judgement.is_oom is True
        return judgement


def read_counters(proc: Path, cgroups: Path) -> OomCounters:
    """The counters now."""
    host = _oom_kill(proc / "vmstat")
    for folder, version in folders(cgroups, _text(proc / "self" / "cgroup"), "memory"):
        path = folder / _FILES[version]
        group = _oom_kill(path)
        if group is not None:
            return OomCounters(group, host, str(path))
    return OomCounters(None, host)


def _risen(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _oom_kill(path: Path) -> int | None:
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
