"""How a child ended, in a file that outlives the supervisor's memory of it.

Written by the supervisor for each child that has ended, read by the doctor and by `firstlight ps`. Invariant:
the file is complete or absent, as it is renamed into place; what was not measured is None.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_PREFIX, _SUFFIX = "exit-", ".json"


class ExitNote(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the child `name`. `told`: we had asked it to end; `is_oom`: for want of memory."""

    name: str
    pid: int
    code: int | None
    signal: int | None
    told: bool
    time_s: float  # Unix time
    is_oom: bool | None
    oom_evidence: str = ""


def write_exit_note(run_dir: str | Path, note: ExitNote) -> None:
    """Leave `note` in the run directory. Raises OSError."""
    path = _path(run_dir, note.name)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(note) + b"\n")
    os.replace(partial, path)


def read_exit_notes(run_dir: str | Path) -> dict[str, ExitNote]:
    """The notes of a run by the name of the child; those that cannot be read are left out."""
    notes: dict[str, ExitNote] = {}
    for path in sorted(Path(run_dir).glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=ExitNote)
        except (OSError, msgspec.DecodeError):
            continue
        notes[path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)] = note
    return notes


def _path(run_dir: str | Path, name: str) -> Path:
    return Path(run_dir) / f"{_PREFIX}{name}{_SUFFIX}"
