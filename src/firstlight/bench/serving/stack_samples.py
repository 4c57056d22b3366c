"""Where a Python process spends its processor time, by samples of its stack: which package, which file.

Runs `py-spy record`, which must be installed. Invariant: a sample counts for the innermost frame that belongs
to something a reader knows, so that the shares add up to one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from firstlight.base.errors import UsageError
from firstlight.doctor.collect.stacks import find_tool

_RATE_PER_S = 200
_SAMPLE_S = 2
_LEAVE_S = 30.0
_MOST_ROWS = 14
_OURS = re.compile(r"\((?:\S*/)?firstlight/([\w/]+)\.py")
_FRAME = re.compile(r"\((?:\S*/)?(?:site-packages|python3\.\d+|lib-dynload)/([\w.]+)")


@dataclass(frozen=True)
class Sampled:
    """`what`: a file of ours or a package; `share` of all samples."""

    what: str
    share: float


def sample_stacks(pid: int, is_over: Callable[[], bool]) -> tuple[Sampled, ...]:
    """Samples until it is over, the largest shares first. Raises `UsageError` without py-spy."""
    counts: Counter[str] = Counter()
    while not is_over():
        counts += tally(_record(pid))
    total = sum(counts.values()) or 1
    return tuple(Sampled(what, count / total) for what, count in counts.most_common(_MOST_ROWS))


def tally(stacks: str) -> Counter[str]:
    """Samples by their innermost known frame, of `py-spy record --format raw`: "outer;inner 12" a line."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, number = line.rpartition(" ")
        if number.isdigit():
            counts[_place(frames.split(";"))] += int(number)
    return counts


def _place(frames: list[str]) -> str:
    for frame in reversed(frames):
        if ours := _OURS.search(frame):
            return f"firstlight.{ours[1].replace('/', '.')}"
        if theirs := _FRAME.search(frame):
            return theirs[1].removesuffix(".py")
    return "other"


def _record(pid: int) -> str:
    program = find_tool()
    if program is None:
        raise UsageError("a profile needs py-spy, which is not installed.", "Run `pip install py-spy`.")
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        path = Path(folder) / "stacks"
        command = [program, "record", "--pid", str(pid), "--format", "raw", "--output", str(path)]
        command += [
            "--rate",
            str(_RATE_PER_S),
            "--duration",
            str(_SAMPLE_S),
            "--nonblocking",
            "--full-filenames",
        ]
        subprocess.run(command, capture_output=True, timeout=_LEAVE_S, check=False)
        return path.read_text() if path.exists() else ""
