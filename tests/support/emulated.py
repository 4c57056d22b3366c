"""The native library with the code for AVX-512 in the place of AVX2, its one special instruction emulated.

Used by tests of the native operators, so that this code runs on any machine with AVX2. Invariant: compiled
once for the sources as they are, and kept where the library itself is kept.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from functools import cache
from pathlib import Path

from firstlight.base.environment import cache_directory
from firstlight.ops.cpu.build import compile_library, library_name
from firstlight.ops.cpu.library import load


@cache
def emulated_library() -> ctypes.CDLL:
    """Its instruction set 2 is what the real library has as 4."""
    path = cache_directory() / "native" / library_name().replace("firstlight", "emulated")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            forget_older(path)
            compile_library(path, ("-DFL_EMULATE_VNNI", "-O1"))
    return load(path)


def forget_older(path: Path) -> None:
    """Removes libraries of earlier sources."""
    for old in path.parent.glob("libemulated-*.so"):
        os.unlink(old)
