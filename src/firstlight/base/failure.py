"""The last words of a child: why it ends, in a file that the launcher turns into one clear message.

Written at the top of a rank or of the api process, read by the launcher after the child's end. Invariant:
the file is complete or absent, as it is renamed into place.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from firstlight.base.errors import FirstlightError


class Failure(msgspec.Struct, frozen=True):
    """Why a child ended: the error's message, hint and exit code."""

    message: str
    hint: str
    exit_code: int


def write_failure(run_dir: str | Path, name: str, error: BaseException) -> None:
    """Leave `error` as the last words of the child `name` ("rank-0", "api")."""
    if isinstance(error, FirstlightError):
        failure = Failure(str(error), error.hint, error.exit_code)
    else:
        message = f"{type(error).__name__}: {error}"
        failure = Failure(message, "This is a bug; run again with --debug to see where it happened.", 1)
    path = _path(run_dir, name)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(failure))
    os.replace(partial, path)


def read_failure(run_dir: str | Path, name: str) -> Failure | None:
    """The last words of the child `name`, or None if it left none."""
    try:
        return msgspec.json.decode(_path(run_dir, name).read_bytes(), type=Failure)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _path(run_dir: str | Path, name: str) -> Path:
    return Path(run_dir) / f"failure-{name}.json"
