"""The supervisor's verdict on its run, in a file of the run's directory: what everybody cites of one event.

Written by the supervisor when it tells its clients and when the run ends, read by the doctor and by
`firstlight ps`. Invariant: the file is complete or absent, as it is renamed into place, and holds the latest
verdict only; one that was withdrawn says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_FILE = "verdict.json"


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended or does not go on. `subject`: the process to blame, empty if that is not known.

    `is_stall`: everyone lived and nothing moved; else a process had ended. `cause` and `grade` are the
    doctor's names, where it was asked. `withdrawn_s`: when what stood still moved again.
    """

    message: str
    hint: str
    exit_code: int
    subject: str
    is_stall: bool
    time_s: float  # Unix time
    cause: str = ""
    grade: str = ""
    withdrawn_s: float | None = None


def write_run_verdict(run_dir: str | Path, verdict: RunVerdict) -> None:
    """Leave `verdict` in the run directory. Raises OSError."""
    path = Path(run_dir) / _FILE
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(verdict) + b"\n")
    os.replace(partial, path)


def read_run_verdict(run_dir: str | Path) -> RunVerdict | None:
    """The verdict that stands; None where there is none, it was withdrawn, or it cannot be read."""
    verdict = last_run_verdict(run_dir)
    return verdict if verdict is not None and verdict.withdrawn_s is None else None


def last_run_verdict(run_dir: str | Path) -> RunVerdict | None:
    """The latest verdict, also one that was withdrawn."""
    try:
        return msgspec.json.decode((Path(run_dir) / _FILE).read_bytes(), type=RunVerdict)
    except (OSError, msgspec.DecodeError):
        return None
