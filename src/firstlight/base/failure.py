"""The last words of a child: why it ends, in a file that the launcher turns into one clear message.

Written at the top of a rank or of the api process, read by the launcher after the child's end. Invariant:
the file is complete or absent, as it is renamed into place.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec

from firstlight.base.errors import FirstlightError

ADDRESS_SPACE = "the address space is limited to"
_SHORT = ("can't start new thread", "allocate memory", "failed to map segment")
_BUG = "This is a bug; run again with --debug to see where it happened."


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
        failure = Failure(*explained(error), 1)
    path = _path(run_dir, name)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(failure))
    os.replace(partial, path)


def explained(error: BaseException) -> tuple[str, str]:
    """An error that nobody foresaw: its message, and what to do. What it does not say itself: a thread that
    cannot be started, or memory that cannot be had, where the address space is limited.
    """
    message, hint = f"{type(error).__name__}: {error}", _BUG
    is_short = isinstance(error, MemoryError) or any(word in message for word in _SHORT)
    if is_short and (limit := address_limit()):
        message += f" ({limit}: Cannot allocate memory)"
        hint = "Raise the limit: `ulimit -v unlimited`."
    return message, hint


def address_limit() -> str:
    """That this process's address space is limited, and to what; empty where it is not."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if limit_bytes == resource.RLIM_INFINITY else f"{ADDRESS_SPACE} {limit_bytes >> 20} MiB"


def read_failure(run_dir: str | Path, name: str) -> Failure | None:
    """The last words of the child `name`, or None if it left none."""
    try:
        return msgspec.json.decode(_path(run_dir, name).read_bytes(), type=Failure)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _path(run_dir: str | Path, name: str) -> Path:
    return Path(run_dir) / f"failure-{name}.json"
