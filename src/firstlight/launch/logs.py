"""The logs of a run that failed: what each of its processes printed last, in a file each.

Written by `launch.serve` at the end of such a run. Invariant: there is a file for every process that ended,
also for one that printed nothing, as that says something too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firstlight.launch.control import Death
from firstlight.launch.verdict import title


def log_path(run_dir: Path, name: str) -> Path:
    """The log of the child `name`."""
    return run_dir / f"{name}.log"


def write_logs(run_dir: Path, deaths: Sequence[Death]) -> None:
    """One file for each child; a disk that is full must not hide why the run ended."""
    for death in deaths:
        how = f"{title(death.name)} {death.cause.describe()}" + (
            " after it was told to end" if death.told else ""
        )
        last = "its last lines" if death.last_lines else "it had printed nothing"
        text = "".join(f"{line}\n" for line in (f"# {how}; {last}", *death.last_lines))
        try:
            log_path(run_dir, death.name).write_text(text, encoding="utf-8")
        except OSError:
            return
