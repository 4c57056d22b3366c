"""The private directory of one run: configuration, secrets, sockets, progress and last words.

Made by `launch.serve`, read by the children. Invariant: only our user can enter it (mode 0700), and its path
is short enough for the Unix sockets inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from firstlight.base import environment
from firstlight.base.config import API_KEYS_FILE
from firstlight.base.errors import ResourceError

_MAX_SOCKET_PATH = 107  # bytes of sun_path without its end
_LONGEST_SOCKET_NAME = "/requests.sock"


def make_run_directory() -> Path:
    """A new private directory under the user's runtime folder, or the temporary one."""
    candidates = [environment.runtime_directory(), Path(tempfile.gettempdir()), Path("/tmp")]
    problem = "its path is too long for Unix sockets"
    for parent in candidates:
        if parent is None or not _fits(parent):
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="firstlight-", dir=parent))
        except OSError as error:
            problem = f"{parent}: {error.strerror}"
    raise ResourceError(
        f"cannot make a private run directory: {problem}.", "Set TMPDIR to a short, writable folder."
    )


def write_api_keys(run_dir: Path, keys: Sequence[str]) -> None:
    """The keys, one a line, for our user's eyes only."""
    fd = os.open(run_dir / API_KEYS_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.writelines(f"{key}\n" for key in keys)


def remove_run_directory(run_dir: Path, *, keep_logs: bool) -> None:
    """Remove the directory; with `keep_logs` only the secrets and sockets go, for who looks into a crash."""
    if not keep_logs:
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    for path in [run_dir / API_KEYS_FILE, *run_dir.glob("*.sock")]:
        with contextlib.suppress(OSError):
            path.unlink()


def _fits(parent: Path) -> bool:
    longest = os.fsencode(parent / "firstlight-12345678") + _LONGEST_SOCKET_NAME.encode()
    return len(longest) <= _MAX_SOCKET_PATH
