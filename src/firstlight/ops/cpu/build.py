"""Compiles the native library from the C++ sources beside it. Standard library only: `setup.py` loads it too.

Called at installation, and by `library` at the first start of an installation that brought no library. The
kernels are compiled once for each instruction set; which one runs is decided at run time. Invariant: the
library's name contains a hash of its sources and flags, so that an old one is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
# No fused multiply-add but where the source says so: every number of rows must run the same operations.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
COMPILE_LIMIT_S = 300.0


class BuildError(Exception):
    """Why there is no library, as the end of a sentence."""


def library_name() -> str:
    """The file name of the library that belongs to the sources as they are."""
    digest = hashlib.sha256(repr((FLAGS, AVX512, platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return f"libfirstlight-{digest.hexdigest()[:16]}.so"


def compile_library(
    target: Path, extra_flags: tuple[str, ...] = (), on_done: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Compiles and links into `target`, which appears whole or not at all. Raises `BuildError`.

    `on_done(done, total)` hears of every file that the compiler has made.
    """
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    variants: dict[str, tuple[str, ...]] = {"portable": ()}
    if platform.machine() in ("x86_64", "AMD64"):
        variants |= {"avx2": AVX2, "avx512": AVX512}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            _compile(compiler, variants, Path(folder), extra_flags, on_done)
            os.replace(Path(folder) / "library.so", target)
    except OSError as error:
        raise BuildError(f"it cannot be written to {target.parent}: {error.strerror}") from error


def _compile(
    compiler: str,
    variants: dict[str, tuple[str, ...]],
    folder: Path,
    extra_flags: tuple[str, ...],
    on_done: Callable[[int, int], None],
) -> None:
    jobs = {name: ["-c", str(SOURCES / f"{name}.cpp")] for name in ("pool", "exchange", "interface")}
    for name, flags in variants.items():
        jobs[name] = [*flags, f"-DFL_KERNELS=fl_{name}", "-c", str(SOURCES / "kernels.cpp")]
    commands = [
        [compiler, *FLAGS, *extra_flags, *arguments, "-o", str(folder / f"{name}.o")]
        for name, arguments in jobs.items()
    ]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        running = [pool.submit(_run, command) for command in commands]
        on_done(0, len(commands) + 1)
        for done, future in enumerate(as_completed(running), 1):
            future.result()
            on_done(done, len(commands) + 1)
    objects = [str(folder / f"{name}.o") for name in jobs]
    _run([compiler, *FLAGS, *extra_flags, "-shared", *objects, "-o", str(folder / "library.so")])
    on_done(len(commands) + 1, len(commands) + 1)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {COMPILE_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}")
