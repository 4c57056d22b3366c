"""Places with limits of their own: groups of processes with little memory, slow disks, few tasks.

Used by the kinds that need one. All of them need root or a group that was handed to us. Invariant: what this
machine does not have is `Unavailable` with the reason, and a group is removed when the ward ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from patients.patient import Unavailable, Ward

_ROOT = Path("/sys/fs/cgroup")
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
NOBODY = 65534


class Group:
    """A control group of this ward; `files` are written in order, by the names of version 1 and of 2."""

    def __init__(self, ward: Ward, controller: str, files: dict[tuple[str, str], str]) -> None:
        is_old = (_ROOT / controller).is_dir()
        parent = _ROOT / controller if is_old else _ROOT
        self._path = parent / f"w-{ward.token}"
        try:
            self._path.mkdir()
            ward.stack.callback(self._remove)
            for (old, new), text in files.items():
                (self._path / (old if is_old else new)).write_text(text)
        except OSError as error:
            what = f"no group of the controller {controller!r} can be made here"
            raise Unavailable(f"{what}: {error.strerror} (it needs root and a writable tree)") from error

    def take(self, pid: int) -> None:
        """Moves a process in; its children to come follow."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def enter(self) -> None:
        """For `preexec_fn`."""
        self.take(os.getpid())

    def _remove(self) -> None:
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.05)


def little_memory(ward: Ward, limit_bytes: int) -> Group:
    """A group whose processes the kernel ends when they want more."""
    names = ("memory.limit_in_bytes", "memory.max")
    return Group(ward, "memory", {names: str(limit_bytes)})


def few_tasks(ward: Ward, limit: int) -> Group:
    """A group that may have so many threads."""
    return Group(ward, "pids", {("pids.max", "pids.max"): str(limit)})


def slow_disk(ward: Ward, bytes_per_s: int) -> Group:
    """A group that reads so slowly from the disk under the ward's folder."""
    device = os.stat(ward.folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if os.major(device) == 0:
        raise Unavailable(f"{ward.folder} is on no block device, whose reads could be slowed down")
    names = ("blkio.throttle.read_bps_device", "io.max")
    is_old = (_ROOT / "blkio").is_dir()
    rate = f"{number} {bytes_per_s}" if is_old else f"{number} rbps={bytes_per_s}"
    return Group(ward, "blkio" if is_old else "io", {names: rate})


def uncached_copy(ward: Ward, model: Path) -> Path:
    """A copy of a model of which no byte is in memory."""
    copy = ward.folder / "model"
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return copy


def small_shared_memory(size_bytes: int) -> Callable[[], None]:
    """For `preexec_fn`: a /dev/shm of this size, for the process and its children only."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        steps = (
            libc.unshare(_CLONE_NEWNS),
            libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
            libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, f"size={size_bytes}".encode()),
        )
        if any(steps):
            raise OSError(ctypes.get_errno(), "no mounts of our own")

    return prepare
