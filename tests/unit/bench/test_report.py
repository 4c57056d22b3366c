"""Where results go."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from firstlight.base.errors import ResourceError, UsageError
from firstlight.bench import report
from firstlight.bench.measures import summarize
from firstlight.bench.plots import Bars, Panel, save_panels


def test_a_missing_folder_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        report.require_writable(None, tmp_path / "no" / "r.json")


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        report.require_writable(tmp_path / "r.png")
    assert "plots" in caught.value.hint
    report.require_writable(tmp_path / "r.json")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError):
        report.save_json(tmp_path, "serving", {})


def test_rows_have_a_cell_for_each_column() -> None:
    for summary in (None, summarize([1.0, 2.0])):
        assert len(report.summary_row("x", summary)) == 1 + len(report.SUMMARY_COLUMNS)


def test_panels_of_both_kinds(tmp_path: Path) -> None:
    panels = [
        Panel("lines", "x", "y", {"a": [(1, 2), (2, 3)], "b": [(1, 1)]}, is_log_x=True),
        Bars("bars", "s", {"one": 1.0, "two": 2.0}, goal=1.5),
    ]
    save_panels(tmp_path / "p.png", "title", panels)
    assert (tmp_path / "p.png").stat().st_size > 5_000
