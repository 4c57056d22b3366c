"""The ends of the log files: those that standard streams lead to, and those in the run directory.

Lines are split at carriage returns too, as progress bars rewrite one line. A stream that is a pipe or a
terminal cannot be read back and is told by the descriptors. Invariant: only the last bytes of a file are
read, whatever its size.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_process import LogTail
from firstlight.doctor.collect.scene import Collector, Scene, failed

TAIL_BYTES = 64 * 1024
MAX_LINES = 200
MAX_LINE_CHARS = 600
MAX_LOGS = 32
_ENDS = re.compile(r"\r\n|\r|\n")


def collect_logs(scene: Scene) -> Iterator[Observation]:
    """Each file once; its subject is the one process that writes it, else the run."""
    for path, keys in list(_files(scene).items())[:MAX_LOGS]:
        subject = next(iter(keys)) if len(keys) == 1 else RUN
        try:
            value = read_tail(path)
        except OSError as error:
            yield Observation(subject=subject, source=str(path), value=failed("logs", error))
            continue
        yield Observation(subject=subject, source=str(path), value=value)


def read_tail(path: Path) -> LogTail:
    """The last lines of a file, without secrets. Raises `OSError`."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        start = max(0, status.st_size - TAIL_BYTES)
        data = os.pread(file.fileno(), TAIL_BYTES, start)
    text = data.decode("utf-8", "replace")
    parts = _ENDS.split(text)
    if start:
        parts = parts[1:]  # begins in the middle of a line
    lines = [hide_in_text(line[:MAX_LINE_CHARS]) for line in parts if line.strip()]
    return LogTail(
        path=str(path),
        size_bytes=status.st_size,
        modified_wall_s=status.st_mtime,
        lines=tuple(lines[-MAX_LINES:]),
        has_partial=bool(text) and text[-1] not in "\r\n",
    )


def _files(scene: Scene) -> dict[Path, set[str]]:
    """Log files and who writes them."""
    found: dict[Path, set[str]] = {}
    for process in scene.target.processes:
        for path in _streams(scene, process.pid):
            found.setdefault(path, set()).add(process.key)
    if scene.target.run_dir is not None:
        folder = Path(scene.target.run_dir)
        for path in sorted((*folder.glob("*.log"), *folder.glob("logs/*.log"))):
            found.setdefault(path, set()).add(path.stem)
    return found


def _streams(scene: Scene, pid: int) -> Iterator[Path]:
    """The regular files that standard output and error lead to, read through the process's own root."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            link = scene.procfs.path(pid, "fd", fd)
            target = os.readlink(link)
            if target.startswith("/") and stat.S_ISREG(os.stat(link).st_mode):
                path = Path(target)
                yield path if path.exists() else link


LOGS = Collector("logs", collect_logs, deadline_s=3.0)
