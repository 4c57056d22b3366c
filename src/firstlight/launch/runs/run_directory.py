"""The private directory of one run: configuration, secrets, sockets, progress and last words.

After a failure it stays, with the logs; a later start removes it. Invariants: only our user can enter it
(mode 0700), and its path is short enough for the Unix sockets inside; nothing is removed but directories of
ours whose launcher has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from firstlight.base import environment
from firstlight.base.blackbox.store import drop_boxes
from firstlight.base.config import API_KEYS_FILE
from firstlight.base.errors import ResourceError
from firstlight.launch.runs.run_record import RunRecord, ended_run, living_run, mark_ended, write_record

_PREFIX = "firstlight-"
# What is left of ended runs, for who looks into a crash.
_KEPT_RUNS = 5
_KEPT_S = 24 * 3600
_MAX_SOCKET_PATH = 107  # bytes of sun_path without its end
_LONGEST_SOCKET_NAME = "/requests.sock"


class RunDirectory:
    """A run's directory at `path`, marked as in use until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = write_record(path)

    def close(self, *, keep_logs: bool) -> None:
        """Remove it; with `keep_logs` only secrets and sockets go, for who looks into a crash."""
        os.close(self._lock_fd)
        if not keep_logs:
            _remove(self.path)
            return
        mark_ended(self.path)
        for path in [self.path / API_KEYS_FILE, *self.path.glob("*.sock")]:
            with contextlib.suppress(OSError):
                path.unlink()


def make_run_directory() -> RunDirectory:
    """A new private directory under the user's runtime folder, or the temporary one."""
    problem = "its path is too long for Unix sockets"
    for parent in _parents():
        if not _fits(parent):
            continue
        try:
            return RunDirectory(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)))
        except OSError as error:
            problem = f"{parent}: {error.strerror}"
    raise ResourceError(
        f"cannot make a private run directory: {problem}.", "Set TMPDIR to a short, writable folder."
    )


def remove_ended_runs() -> None:
    """Removes what ended runs of ours left, but for the newest few of the last day. Never fails."""
    ended = [(_last_write_s(path), path) for path in ended_runs()]
    newest_first = sorted(ended, reverse=True)
    for place, (written_s, path) in enumerate(newest_first):
        if place >= _KEPT_RUNS or time.time() - written_s > _KEPT_S:
            _remove(path)


def living_runs() -> dict[Path, RunRecord]:
    """The runs of our user that go on, the oldest first."""
    found = {path: record for path in _candidates() if (record := living_run(path)) is not None}
    return dict(sorted(found.items(), key=lambda run: run[1].started_s))


def ended_runs() -> list[Path]:
    """What is left of our user's runs that are over, the oldest first."""
    found = {path: record for path in _candidates() if (record := ended_run(path)) is not None}
    return sorted(found, key=lambda path: found[path].started_s)


def write_api_keys(run_dir: Path, keys: Sequence[str]) -> None:
    """The keys, one a line, for our user's eyes only."""
    fd = os.open(run_dir / API_KEYS_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.writelines(f"{key}\n" for key in keys)


def _remove(run_dir: Path) -> None:
    drop_boxes(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)


def _parents() -> list[Path]:
    """Where run directories are made, the best place first."""
    candidates = [environment.runtime_directory(), *environment.temporary_directories(), Path("/tmp")]
    return list(dict.fromkeys(parent for parent in candidates if parent is not None))


def _candidates() -> Iterator[Path]:
    for parent in _parents():
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            yield from (parent / entry.name for entry in entries if entry.name.startswith(_PREFIX))


def _last_write_s(run_dir: Path) -> float:
    """When something in it was last written, in Unix time; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return max(path.lstat().st_mtime for path in (run_dir, *run_dir.iterdir()))
    return 0.0


def _fits(parent: Path) -> bool:
    longest = os.fsencode(parent / f"{_PREFIX}12345678") + _LONGEST_SOCKET_NAME.encode()
    return len(longest) <= _MAX_SOCKET_PATH
