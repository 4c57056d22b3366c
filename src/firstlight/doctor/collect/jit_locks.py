"""Lock files in the caches of compiled kernels and downloads.

torch's FileBaton is a file whose *existence* is the lock: killed builders leave it behind, and every later
process waits forever. The other caches use flock, whose files stay without meaning anything, so those are
named only while somebody has them open. Invariant: nothing is ever deleted here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN, TargetProcess
from firstlight.doctor.case.values_host import JitLocks, LockFile
from firstlight.doctor.collect.file_locks import lock_holders
from firstlight.doctor.collect.scene import Collector, Scene

MAX_ENTRIES = 50_000
# cache: (variable that names its folder, what follows it; the folder below the home without it)
_CACHES = {
    "torch_extensions": ("TORCH_EXTENSIONS_DIR", "", ".cache/torch_extensions"),
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer", ".cache/flashinfer"),
    "triton": ("TRITON_CACHE_DIR", "", ".triton/cache"),
    "torchinductor": ("TORCHINDUCTOR_CACHE_DIR", "", ""),
    "vllm": ("VLLM_CACHE_ROOT", "", ".cache/vllm"),
    "deep_gemm": ("DG_JIT_CACHE_DIR", "", ".deep_gemm"),
    "tvm-ffi": ("TVM_FFI_CACHE_DIR", "", ".cache/tvm-ffi"),
    "tilelang": ("TILELANG_CACHE_DIR", "", ".tilelang"),
    "hub": ("HF_HOME", "hub/.locks", ".cache/huggingface/hub/.locks"),
}


def collect_jit_locks(scene: Scene) -> Iterator[Observation]:
    """Of all caches that the ranks use."""
    folders: dict[Path, str] = {}
    for process in scene.target.processes:
        folders.update(_folders(scene, process))
    found = [(cache, path) for folder, cache in folders.items() for path in _lock_files(folder)]
    openers = _openers(scene, {str(path) for _, path in found})
    holders = lock_holders(
        scene.procfs, {path: os.stat(path).st_ino for path in openers if os.path.exists(path)}
    )
    by_inode = {inode: tuple(pid for pid, _ in held) for inode, held in holders.items()}
    locks = [
        lock
        for cache, path in found
        if (lock := _lock(scene, cache, path, openers.get(str(path), ()), by_inode)) is not None
    ]
    names = tuple(sorted(map(str, folders)))
    source = ", ".join(names) or "no cache folder"
    yield Observation(subject=RUN, source=source, value=JitLocks(locks=tuple(locks), folders=names))


def _folders(scene: Scene, process: TargetProcess) -> dict[Path, str]:
    """The cache folders of one process that exist."""
    variables: dict[str, str] = {}
    with contextlib.suppress(OSError):
        variables = scene.procfs.environ(process.pid)
    home = variables.get("HOME") or _home(process.uid)
    found: dict[Path, str] = {}
    for cache, (variable, after, below_home) in _CACHES.items():
        named = variables.get(variable)
        path = Path(named, after) if named else Path(home, below_home) if home and below_home else None
        with contextlib.suppress(OSError):
            found.update({path: cache} if path is not None and path.is_dir() else {})
    return found


def _home(uid: int | None) -> str:
    try:
        return pwd.getpwuid(os.getuid() if uid is None else uid).pw_dir
    except KeyError:
        return ""


def _lock_files(folder: Path) -> Iterator[Path]:
    num_left = MAX_ENTRIES
    for parent, _, names in os.walk(folder):
        for name in names:
            if name == "lock" or name.endswith(".lock"):
                yield Path(parent, name)
        num_left -= len(names) + 1
        if num_left < 0:
            return


def _openers(scene: Scene, paths: set[str]) -> dict[str, tuple[int, ...]]:
    """Who has them open, among the processes that we may look into."""
    found: dict[str, tuple[int, ...]] = {}
    for pid in scene.procfs.pids() if paths else ():
        with contextlib.suppress(OSError):
            for _, link in scene.procfs.links(pid):
                if link in paths:
                    found[link] = (*found.get(link, ()), pid)
    return found


def _lock(
    scene: Scene, cache: str, path: Path, openers: tuple[int, ...], holders: dict[int, tuple[int, ...]]
) -> LockFile | None:
    is_baton = path.name == "lock"
    if not is_baton and not openers:
        return None
    try:
        status = path.stat()
    except OSError:
        return None  # just released
    boot_s, launch_s = scene.procfs.boot_wall_s(), scene.target.started_wall_s
    return LockFile(
        cache=cache,
        path=str(path),
        age_s=max(0.0, time.time() - status.st_mtime),
        is_existence_lock=is_baton,
        is_older_than_launch=status.st_mtime < launch_s - 1 if launch_s else None,
        is_older_than_boot=status.st_mtime < boot_s if boot_s else None,
        openers=tuple(scene.target.key_of(pid) for pid in openers),
        flock_holders=tuple(scene.target.key_of(pid) for pid in holders.get(status.st_ino, ())),
    )


JIT_LOCKS = Collector("jit-locks", collect_jit_locks, deadline_s=5.0, is_dynamic=False)
