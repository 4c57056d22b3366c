"""A model's folder that is new: room for it is looked for first, and it appears whole or not at all.

Invariant: whatever ends the writing, an error, Ctrl-C or SIGTERM, nothing half-written stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from firstlight.base.errors import ResourceError, UsageError
from firstlight.facts.planning.memory_budget import format_bytes

DISK_RESERVE_BYTES = 64 * 1024 * 1024


def require_new(target: Path) -> None:
    """Raises `UsageError` where something is there already, or nobody may look."""
    try:
        exists = target.exists()
    except OSError as error:
        raise _cannot_be_made(target, error) from error
    if exists:
        raise UsageError(f"{target} exists already.", "Give a new folder, or remove this one first.")


@contextmanager
def new_folder(target: Path, weight_bytes: int, what: str, remedy: str) -> Iterator[Path]:
    """A hidden folder to write to, which gets the name `target` when the block ends without an error.

    Raises `UsageError` where it cannot be made, `ResourceError` for a disk that has no room for
    `weight_bytes` of `what` ("the converted model"); `remedy` is the sentence about what to do then.
    """
    target = target.absolute()
    require_new(target)
    _require_room(target, weight_bytes, what, remedy)
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    with _term_as_exit():
        try:
            _make(target, partial)
            yield partial
            os.rename(partial, target)
        except OSError as error:
            raise ResourceError(
                f"{target} cannot be written: {error.strerror or error}.",
                "Choose another folder, or make room.",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _make(target: Path, partial: Path) -> None:
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise _cannot_be_made(target, error) from error


def _cannot_be_made(target: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The folder {target} cannot be made: {error.strerror or error}.",
        "Give a folder where you may write.",
    )


def _require_room(target: Path, weight_bytes: int, what: str, remedy: str) -> None:
    parent = next(folder for folder in target.parents if folder.exists())
    needed_bytes, disk = weight_bytes + DISK_RESERVE_BYTES, shutil.disk_usage(parent)
    # A file system without any space holds no files (/proc): making the folder says so.
    if disk.total and disk.free < needed_bytes:
        raise ResourceError(
            f"{parent} has {format_bytes(disk.free)} free; {what} needs {format_bytes(needed_bytes)}.", remedy
        )


@contextmanager
def _term_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the program as Ctrl-C does, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # one is enough: a second would break off the cleaning up
    raise SystemExit(128 + number)
