"""Where boxes are while a run lives, and after it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from firstlight.base.blackbox.reader import read_box
from firstlight.base.blackbox.store import (
    box_path,
    boxes_of,
    drop_boxes,
    keep_boxes,
    make_box_folder,
    open_own_box,
)
from firstlight.base.imports import counted_imports


def test_boxes_of_a_run_on_a_disk_are_in_memory_until_its_end(tmp_path: Path) -> None:
    real = make_box_folder(tmp_path)
    try:
        box = open_own_box(tmp_path, "rank-1", role="rank", rank=1)
        box.enter_phase("weights")
        assert boxes_of(tmp_path) == {"rank-1": box_path(tmp_path, "rank-1")}
        assert real.stat().st_mode & 0o777 == 0o700
        keep_boxes(tmp_path)
    finally:
        assert real == tmp_path / "boxes" or not real.exists()
    kept = read_box(box_path(tmp_path, "rank-1"))
    assert (kept.rank, kept.pid, kept.run_id) == (1, os.getpid(), tmp_path.name)
    assert kept.phase is not None
    assert kept.phase.name == "weights"
    assert not (tmp_path / "boxes").is_symlink()


def test_without_shared_memory_the_run_directory_has_to_do(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert make_box_folder(run_dir, shared_memory=tmp_path / "absent") == run_dir / "boxes"


def test_the_supervisors_entry_and_the_process_share_a_box(tmp_path: Path) -> None:
    open_own_box(tmp_path, "api", role="api").enter_phase("spawn")
    open_own_box(tmp_path, "api", role="api").enter_phase("imports")
    assert [phase.name for phase in read_box(box_path(tmp_path, "api")).phases] == ["spawn", "imports"]


def test_imports_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = open_own_box(tmp_path, "rank-0", role="rank", rank=0)
    before = list(sys.meta_path)
    with counted_imports(box, "torch"):
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        import colorsys  # noqa: F401
    assert sys.meta_path == before
    phase = read_box(box_path(tmp_path, "rank-0")).phase
    assert phase is not None
    assert (phase.name, phase.detail, phase.odometer.unit) == ("imports", "torch", "modules")
    assert phase.odometer.done >= 1


def test_boxes_that_nobody_keeps_leave_the_memory(tmp_path: Path) -> None:
    real = make_box_folder(tmp_path)
    if real == tmp_path / "boxes":
        return  # the temporary folder is in memory itself
    open_own_box(tmp_path, "api", role="api")
    drop_boxes(tmp_path)
    assert not real.exists()


def test_a_link_that_we_did_not_make_is_not_followed(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.mkdir()
    (run_dir / "boxes").symlink_to(other)
    drop_boxes(run_dir)
    assert other.exists()
