"""The private directory of a run."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from firstlight.base.config import API_KEYS_FILE
from firstlight.launch.run_directory import make_run_directory, remove_run_directory, write_api_keys


def test_only_we_can_enter_it_and_read_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_dir = make_run_directory()
    write_api_keys(run_dir, ["one", "two"])
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / API_KEYS_FILE).stat().st_mode) == 0o600
    assert (run_dir / API_KEYS_FILE).read_text() == "one\ntwo\n"
    remove_run_directory(run_dir, keep_logs=False)
    assert not run_dir.exists()


def test_after_a_crash_the_logs_stay_and_the_secrets_go(tmp_path: Path) -> None:
    write_api_keys(tmp_path, ["one"])
    (tmp_path / "rank-0.log").write_text("the end")
    remove_run_directory(tmp_path, keep_logs=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.log"]


def test_a_folder_with_a_long_path_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    run_dir = make_run_directory()
    assert not run_dir.is_relative_to(deep)
    remove_run_directory(run_dir, keep_logs=False)
