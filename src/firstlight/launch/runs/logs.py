"""The logs of a run: what each of its processes prints, in a file each, how it ended, and the verdict on it.

Written by `output` line by line, closed by `launch.serve`. Invariant: there is a file for every process, also
for one that printed nothing, as that says something too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from firstlight.base.run_verdict import RunVerdict, read_run_verdict, write_run_verdict
from firstlight.launch.events import Death
from firstlight.launch.processes.commands import title
from firstlight.launch.processes.orphans import Orphan
from firstlight.launch.verdict import Verdict


def log_path(run_dir: Path, name: str) -> Path:
    """The log of the child `name`."""
    return run_dir / f"{name}.log"


def note_orphan(run_dir: Path, name: str, orphan: Orphan) -> None:
    """A line in the log of `name` about a process that it had started and left behind."""
    _append(run_dir, name, f"process {orphan.pid}, left behind by {title(name)}, {orphan.cause.describe()}")


def write_ends(run_dir: Path, deaths: Sequence[Death]) -> None:
    """The last line of each log; a disk that is full must not hide why the run ended."""
    for death in deaths:
        how = death.cause.describe() + (" after it was told to end" if death.told else "")
        if log_path(run_dir, death.name).exists():  # a process that another one has started has none
            _append(run_dir, death.name, f"{title(death.name)} {how}")


def keep_verdict(run_dir: Path, end: Verdict) -> None:
    """Into the run's record, once for what was said already; a full disk does not keep it from being said."""
    stall, last = end.stall, read_run_verdict(run_dir)
    if end.failure is None or (last is not None and last.message == end.failure.message):
        return
    kept = RunVerdict(
        message=end.failure.message,
        hint=end.failure.hint,
        exit_code=end.exit_code,
        subject=end.subject,
        is_stall=stall is not None,
        time_s=time.time(),
        cause=stall.cause if stall is not None else "",
        grade=stall.grade if stall is not None else "",
    )
    with contextlib.suppress(OSError):
        write_run_verdict(run_dir, kept)


def withdraw_verdict(run_dir: Path) -> None:
    """It moves again: the verdict stays in the record, and counts no more."""
    last = read_run_verdict(run_dir)
    if last is not None:
        with contextlib.suppress(OSError):
            write_run_verdict(run_dir, msgspec.structs.replace(last, withdrawn_s=time.time()))


def _append(run_dir: Path, name: str, text: str) -> None:
    with contextlib.suppress(OSError), log_path(run_dir, name).open("a", encoding="utf-8") as file:
        file.write(f"# {text}\n")
