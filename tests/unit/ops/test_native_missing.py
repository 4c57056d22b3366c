"""A machine that can neither find nor compile the native library uses stock operators, and says why."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.base.errors import ResourceError, UnsupportedError
from firstlight.ops.cpu import build, library
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.pick import pick_cpu_kernels, places


def test_without_a_compiler_stock_operators_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "cache_place", tmp_path.joinpath)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    picked = pick_cpu_kernels("auto", 1)
    assert isinstance(picked, CpuBackend)
    assert "no C++ compiler" in picked.reason
    assert "apt-get install g++" in picked.reason
    with pytest.raises(ResourceError, match=r"no C\+\+ compiler") as caught:
        pick_cpu_kernels("native", 1)
    assert caught.value.hint
    with pytest.raises(UnsupportedError, match=r"--kv-dtype int8 .*no C\+\+ compiler") as unsupported:
        pick_cpu_kernels("auto", 1, kv_dtype="int8")
    assert "apt-get install g++" in unsupported.value.hint


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "cache_place", tmp_path.joinpath)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(compiler))
    picked = pick_cpu_kernels("auto", 1)
    assert isinstance(picked, CpuBackend)
    assert "no such luck" in picked.reason
    assert not list(tmp_path.glob("native/*.so"))


def test_the_first_start_reports_what_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = Path(library.open_library()._name)
    done: list[tuple[int, int]] = []

    def compile_library(target: Path, on_done: library.OnCompile) -> None:
        shutil.copy(compiled, target)
        on_done(5, 5)

    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setattr(library, "cache_place", tmp_path.joinpath)
    monkeypatch.setattr(library, "compile_library", compile_library)
    for _ in range(2):  # the second time it is there
        library.open_library(lambda *step: done.append(step))
    assert done == [(0, 0), (5, 5)]


def test_one_that_waits_for_another_compiler_gives_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setattr(library, "cache_place", tmp_path.joinpath)
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 0.2)
    (tmp_path / "native").mkdir()
    with open(tmp_path / "native" / Path(library.library_name()).with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process has been compiling" in pick_cpu_kernels("auto", 1).reason


def test_stock_operators_can_be_asked_for() -> None:
    assert isinstance(pick_cpu_kernels("stock", 1), CpuBackend)


def test_ranks_lie_side_by_side_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7})
    assert places(2, 0, 2) == [4, 5]
    assert places(2, 1, 2) == [6, 7]
    assert places(2, 0, 1) is None  # the others may be another process's
    assert places(8, 0, 1) is None


def test_threads_that_cannot_be_started_are_an_error_and_no_abort() -> None:
    script = (
        "import resource, sys\n"
        "from firstlight.base.errors import ResourceError\n"
        "from firstlight.ops.cpu.library import open_library, open_pool\n"
        "library = open_library()\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), -1))\n"
        "try:\n    open_pool(library, 64)\n"
        "except ResourceError as error:\n    print(error, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "64 operator threads cannot be started: Cannot allocate memory (the address space" in done.stdout
    assert done.returncode == 0
