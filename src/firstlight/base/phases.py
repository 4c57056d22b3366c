"""The phases of a start, and the lines by which a rank says where it is.

A rank appends to `RUN_DIR/progress.jsonl` through a `ProgressWriter`; the launcher tails that file. Standard
library and msgspec only, so that a rank can write before it imports torch. Invariant: one line is one
`write` call on a file opened for appending, so lines of several ranks never mix.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

PROGRESS_FILE = "progress.jsonl"
READY = "ready"
PHASES = (
    "spawn",
    "imports",
    "device",
    "rendezvous",
    "build",
    "weights",
    "prepare",
    "kv",
    "compile",
    "capture",
    "self-test",
    READY,
    "generate",  # offline: answers instead of a server
    "serving",
    "drain",
)


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is. `time_s` is CLOCK_MONOTONIC, which all processes of a machine share."""

    time_s: float
    rank: int
    phase: str
    done: int = 0
    total: int = 0  # 0: not known
    unit: str = ""  # "bytes", "layers", "shapes", …
    detail: str = ""


class ProgressWriter:
    """Appends the progress of one rank. Owns its file descriptor until `close`."""

    def __init__(self, run_dir: str | Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(Path(run_dir) / PROGRESS_FILE, flags, 0o600)
        self._rank = rank

    def report(self, phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        """Say where the rank is; enters the phase if it is a new one."""
        line = ProgressLine(
            time_s=time.monotonic(),
            rank=self._rank,
            phase=phase,
            done=done,
            total=total,
            unit=unit,
            detail=detail,
        )
        os.write(self._fd, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file; the lines stay."""
        os.close(self._fd)
