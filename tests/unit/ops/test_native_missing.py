"""A machine that can neither find nor compile the native library uses stock operators, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.ops.cpu import build, library
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.pick import pick_cpu_kernels, places


def test_without_a_compiler_stock_operators_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    picked = pick_cpu_kernels("auto", 1, 0)
    assert isinstance(picked, CpuBackend)
    assert "no C++ compiler" in picked.reason


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(compiler))
    picked = pick_cpu_kernels("auto", 1, 0)
    assert isinstance(picked, CpuBackend)
    assert "no such luck" in picked.reason
    assert not list(tmp_path.glob("native/*.so"))


def test_stock_operators_can_be_asked_for() -> None:
    assert isinstance(pick_cpu_kernels("stock", 1, 0), CpuBackend)


def test_ranks_lie_side_by_side_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7})
    assert places(2, 0) == [4, 5]
    assert places(2, 1) == [6, 7]
    assert places(2, 2) is None
    assert places(8, 0) is None
