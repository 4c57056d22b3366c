"""The benchmarks that start or meet a real server, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firstlight.cli.main import make_app
from support.serving import write_chat_model

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench") / "tiny")


def test_startup_says_where_the_time_went(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "start.json"
    done = runner.invoke(
        make_app(), ["bench", "startup", str(model), "--runs", "1", "--json", str(file), "--debug"]
    )
    assert done.exit_code == 0, done.output
    (run,) = json.loads(file.read_text())["runs"]
    assert 0 < run["port_s"] <= run["ready_s"] < run["first_token_s"]
    assert {"launch", "imports", "weights", "answer"} <= set(run["phases_s"])
    assert sum(run["phases_s"].values()) == pytest.approx(run["ready_s"], abs=0.05)
    assert run["pss_bytes"] > 50e6


def test_a_soak_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """Too short to say anything of memory; that everything is answered and freed shows in seconds."""
    file = tmp_path / "soak.json"
    arguments = ["bench", "soak", str(model), "--minutes", "0.1", "--clients", "8", "--json", str(file)]
    done = runner.invoke(make_app(), [*arguments, "--debug"])
    assert file.exists(), done.output
    report = json.loads(file.read_text())
    assert report["failures"] == {}
    assert report["left_over"] == {"requests_running": 0, "requests_waiting": 0, "kv_pages_used": 0}
    assert report["outcomes"]["completed"] > 10
    assert [problem for problem in report["problems"] if "of memory grew" not in problem] == []


def test_a_model_that_does_not_start_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"this is not a model")
    done = runner.invoke(make_app(), ["bench", "startup", str(path), "--runs", "1"])
    assert done.exit_code != 0
    assert "the server ended with exit code" in done.output
