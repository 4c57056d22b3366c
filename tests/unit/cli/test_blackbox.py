"""`firstlight blackbox`: which run it shows, and what it says where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firstlight.base.blackbox.store import make_box_folder, open_own_box
from firstlight.cli.main import make_app
from firstlight.launch.runs import run_directory
from firstlight.launch.runs.run_directory import RunDirectory, make_run_directory

runner = CliRunner()


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where runs are looked for."""
    monkeypatch.setattr(run_directory, "_parents", lambda: [tmp_path])
    monkeypatch.setattr(run_directory, "_fits", lambda _: True)
    return tmp_path


def start_run() -> RunDirectory:
    directory = make_run_directory()
    make_box_folder(directory.path)
    box = open_own_box(directory.path, "rank-0", role="rank", rank=0)
    box.enter_phase("weights", 2, "layers")
    box.close()
    return directory


def test_the_only_running_server_is_found(parent: Path) -> None:
    kept = start_run()
    kept.close(keep_logs=True)  # still our own process: a run goes on as long as its launcher
    (kept.path / "run.json").unlink()
    directory = start_run()
    shown = json.loads(runner.invoke(make_app(), ["blackbox", "--json"]).output)
    assert shown["run_dir"] == str(directory.path)
    assert [entry["phase"] for entry in shown["entries"]] == ["weights"]
    directory.close(keep_logs=False)


def test_several_running_servers_are_listed(parent: Path) -> None:
    runs = [start_run(), start_run()]
    result = runner.invoke(make_app(), ["blackbox"])
    assert result.exit_code == 2
    for directory in runs:
        assert str(directory.path) in result.stderr
        directory.close(keep_logs=False)


def test_without_a_running_server_it_says_what_to_do(parent: Path) -> None:
    result = runner.invoke(make_app(), ["blackbox"])
    assert (result.exit_code, "no server of yours is running" in result.stderr) == (2, True)


def test_a_directory_without_boxes(tmp_path: Path) -> None:
    result = runner.invoke(make_app(), ["blackbox", str(tmp_path)])
    assert (result.exit_code, "holds no black boxes" in result.stderr) == (2, True)


def test_the_text_of_a_run_whose_directory_is_named(parent: Path) -> None:
    directory = start_run()
    output = runner.invoke(make_app(), ["blackbox", str(directory.path)]).output
    assert "rank-0" in output
    assert "enters weights" in output
    directory.close(keep_logs=False)
