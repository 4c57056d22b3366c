"""Digests that are remembered: a file that nobody changed is not read again, a changed one is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from firstlight.base import files
from firstlight.base.files import known_sha256


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read to the end."""
    seen: list[Path] = []
    real = files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda path: seen.append(path) or real(path))
    return seen


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path, memory = tmp_path / "model", tmp_path / "cache" / "digests"
    path.write_bytes(b"weights")
    assert [known_sha256(path, memory) for _ in range(3)] == [digest(b"weights")] * 3
    assert reads == [path]


def test_a_changed_file_is_read_again(tmp_path: Path, reads: list[Path]) -> None:
    path, memory = tmp_path / "model", tmp_path / "digests"
    path.write_bytes(b"weights")
    known_sha256(path, memory)
    times = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some copying tools do
    assert known_sha256(path, memory) == digest(b"WEIGHTS")
    (tmp_path / "other").write_bytes(b"another")
    (tmp_path / "other").replace(path)
    assert known_sha256(path, memory) == digest(b"another")
    assert len(reads) == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x y", b"a" * 200])
def test_a_broken_memory_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path, memory = tmp_path / "model", tmp_path / "digests"
    path.write_bytes(b"weights")
    known_sha256(path, memory)
    (kept,) = memory.iterdir()
    kept.write_bytes(content)
    assert known_sha256(path, memory) == digest(b"weights")


def test_without_a_place_to_remember_it_is_read_each_time(tmp_path: Path, reads: list[Path]) -> None:
    path, blocked = tmp_path / "model", tmp_path / "file"
    path.write_bytes(b"weights")
    blocked.write_text("no folder")
    assert [known_sha256(path, blocked / "digests") for _ in range(2)] == [digest(b"weights")] * 2
    assert len(reads) == 2


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        known_sha256(tmp_path / "none", tmp_path)
