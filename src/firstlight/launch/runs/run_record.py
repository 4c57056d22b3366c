"""Who runs in a run directory: a small file with the launcher's process id and start time, locked.

Written and read by `run_directory`; whatever lists runs reads it too. The lock also tells of a launcher whose
process id means nothing here, as that of another container. Invariant: the file is locked before it has any
content, so a record that can be read and locked belongs to a launcher that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

import msgspec

from firstlight.base.process import start_ticks

RECORD_FILE = "run.json"
_ENDED_FILE = "ended"


class RunRecord(msgspec.Struct, frozen=True):
    """The launcher of a run. `start_ticks` is None where the system does not tell it."""

    pid: int
    start_ticks: int | None
    started_s: float  # Unix time

    def is_running(self) -> bool:
        """Whether this very process exists, and not another one with its number."""
        return self.start_ticks is not None and start_ticks(self.pid) == self.start_ticks


def write_record(run_dir: Path) -> int:
    """Records this process as the launcher; the descriptor that holds the lock, which the caller closes."""
    record = RunRecord(os.getpid(), start_ticks(os.getpid()), time.time())
    fd = os.open(run_dir / RECORD_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: process id and start time must do
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(fd, msgspec.json.encode(record) + b"\n")
    return fd


def mark_ended(run_dir: Path) -> None:
    """This run is over although its launcher goes on: it starts the engine again, in another directory."""
    with contextlib.suppress(OSError):
        (run_dir / _ENDED_FILE).touch(mode=0o600)


def ended_run(run_dir: Path) -> RunRecord | None:
    """The record of a run of ours whose launcher has ended; None for anything else. Follows no link."""
    record, is_alive = _own_record(run_dir)
    return None if is_alive else record


def living_run(run_dir: Path) -> RunRecord | None:
    """The record of a run of ours whose launcher lives, maybe in another container. Follows no link."""
    record, is_alive = _own_record(run_dir)
    return record if is_alive else None


def _own_record(run_dir: Path) -> tuple[RunRecord | None, bool]:
    """The record of a run of ours, if it has one that is whole, and whether the run goes on."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            fd = os.open(RECORD_FILE, flags, dir_fd=folder)
            opened.callback(os.close, fd)
            if not (_is_ours(folder) and _is_ours(fd) and stat.S_ISREG(os.fstat(fd).st_mode)):
                return None, False
            record = msgspec.json.decode(os.read(fd, 4096), type=RunRecord)
            is_marked = _ENDED_FILE in os.listdir(folder)
        except (OSError, msgspec.DecodeError):  # no record, or half of one
            return None, False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return record, True
    return record, record.is_running() and not is_marked


def _is_ours(fd: int) -> bool:
    return os.fstat(fd).st_uid == os.geteuid()
