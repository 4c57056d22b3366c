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


def log_path(run_dir: Path, name: str) -> Path:
    """The log of the child `name`."""
    return run_dir / f"{name}.log"


def write_ends(run_dir: Path, deaths: Sequence[Death]) -> None:
    """The last line of each log; a disk that is full must not hide why the run ended."""
    for death in deaths:
        how = death.cause.describe() + (" after it was told to end" if death.told else "")
        with contextlib.suppress(OSError), log_path(run_dir, death.name).open("a", encoding="utf-8") as file:
            file.write(f"# {title(death.name)} {how}\n")
