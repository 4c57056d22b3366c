"""Where the boxes of a run are: on a memory file system while it runs, beside its logs afterwards.

`RUN_DIR/boxes` is a folder if the run directory is on tmpfs, and a link into /dev/shm otherwise: on a disk,
the kernel may make the writer of a mapped page wait. Invariant: readers use `RUN_DIR/boxes` and need not
know.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from firstlight.base.blackbox.writer import BlackBox, create_box

FOLDER = "boxes"
SUFFIX = ".box"
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
_SHARED_MEMORY = Path("/dev/shm")


def make_box_folder(run_dir: Path, shared_memory: Path = _SHARED_MEMORY) -> Path:
    """The folder for the boxes of a new run; only our user can enter it. Returns where it really is."""
    folder = run_dir / FOLDER
    if _is_in_memory(run_dir) or not _is_usable(shared_memory):
        folder.mkdir(mode=0o700)
        return folder
    real = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=shared_memory))
    folder.symlink_to(real)
    return real


def box_path(run_dir: Path, name: str) -> Path:
    """The box of the process `name` ("rank-0", "api")."""
    return run_dir / FOLDER / f"{name}{SUFFIX}"


def boxes_of(run_dir: Path) -> dict[str, Path]:
    """All boxes of a run by process name, of a run that is over too."""
    return {path.stem: path for path in sorted((run_dir / FOLDER).glob(f"*{SUFFIX}"))}


def open_own_box(run_dir: Path, name: str, *, role: str, rank: int | None = None) -> BlackBox:
    """This process's box, claimed; made now if nobody started us who would have made it."""
    path = box_path(run_dir, name)
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        create_box(path, role=role, rank=rank, run_id=run_dir.name)
    box = BlackBox(path)
    box.claim()
    return box


def keep_boxes(run_dir: Path) -> None:
    """At the end of a run: what a link holds in memory becomes files beside the logs."""
    folder = run_dir / FOLDER
    if not folder.is_symlink():
        return
    real = folder.resolve()
    kept = run_dir / f".{FOLDER}"
    with contextlib.suppress(OSError):  # a full disk: the boxes are lost then, and nothing else
        shutil.copytree(real, kept)
        folder.unlink()
        kept.rename(folder)
    shutil.rmtree(real, ignore_errors=True)


def drop_boxes(run_dir: Path) -> None:
    """What a run directory's link holds in memory goes; call before the directory does. Follows only a link
    that we made: into shared memory, with the run's name, of our user."""
    folder = run_dir / FOLDER
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            return
        real = Path(os.readlink(folder))
        is_ours = real.name.startswith(f"{run_dir.name}-") and real.lstat().st_uid == os.geteuid()
        if is_ours and real.is_dir() and not real.is_symlink():
            shutil.rmtree(real, ignore_errors=True)


def _is_in_memory(path: Path) -> bool:
    """Whether the file system that holds `path` keeps its files in memory."""
    wanted = path.resolve()
    best, kind = -1, ""
    try:
        rows = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for row in rows:
        fields, _, rest = row.partition(" - ")
        mount = Path(fields.split()[4].replace("\\040", " "))
        if wanted.is_relative_to(mount) and len(mount.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(mount.parts), rest.split()[0]
    return kind in _MEMORY_KINDS


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and _is_in_memory(folder)
