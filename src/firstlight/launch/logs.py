"""The logs of a run: what each of its processes prints, in a file each, and how it ended.

Written by `output` line by line, closed by `launch.serve`. Invariant: there is a file for every process, also
for one that printed nothing, as that says something too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from firstlight.launch.commands import title
from firstlight.launch.control import Death
from firstlight.launch.orphans import Orphan


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
        _append(run_dir, death.name, f"{title(death.name)} {how}")


def _append(run_dir: Path, name: str, text: str) -> None:
    with contextlib.suppress(OSError), log_path(run_dir, name).open("a", encoding="utf-8") as file:
        file.write(f"# {text}\n")
