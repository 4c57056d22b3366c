"""`firstlight bench` from outside: its help, and `serving` against a scripted server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firstlight.cli.bench import bench_app
from firstlight.cli.main import make_app
from support.fake_openai import Behaviour, FakeOpenAI

runner = CliRunner()


@pytest.mark.parametrize("command", bench_app.registered_commands, ids=lambda command: str(command.name))
def test_every_command_teaches_by_example(command: object) -> None:
    epilog, name = command.epilog, command.name  # type: ignore[attr-defined]
    assert f"firstlight bench {name}" in epilog


def serving(server: FakeOpenAI, *more: str) -> list[str]:
    small = ["--requests", "4", "--concurrency", "2", "--output-tokens", "5", "--warmup", "1"]
    return ["bench", "serving", "--url", server.url, *small, *more]


def test_serving_shows_and_stores(tmp_path: Path) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    with FakeOpenAI() as server:
        more = ["--goodput", "ttft:60000", "--json", str(file), "--png", str(picture)]
        done = runner.invoke(make_app(), serving(server, *more))
    assert done.exit_code == 0, done.output
    shown = ("closed loop, concurrency 2", "4 answered, 0 failed", "time to first token", "goodput/s")
    for words in (*shown, "bench: 4 of 4 requests"):
        assert words in done.output
    assert json.loads(file.read_text())["output_tokens"] == 20
    assert picture.exists()


def test_failed_requests_make_the_exit_code() -> None:
    with FakeOpenAI(Behaviour(error_after=1)) as server:
        done = runner.invoke(make_app(), [*serving(server), "--warmup", "0"])
    assert done.exit_code == 1
    assert "the engine fell over" in done.output


def test_results_that_cannot_be_stored_are_refused_first(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        done = runner.invoke(make_app(), serving(server, "--json", str(tmp_path / "no" / "r.json")))
    assert done.exit_code == 2
    assert server.requests == []


def test_serving_loads_no_torch() -> None:
    with FakeOpenAI() as server:
        script = (
            "import sys; from firstlight.cli.main import make_app\n"
            f"make_app()({serving(server)!r}, standalone_mode=False)\n"
            "print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_scheduler_benchmark() -> None:
    done = runner.invoke(
        make_app(), ["bench", "scheduler", "--running", "4", "--waiting", "10", "--steps", "5"]
    )
    assert done.exit_code == 0, done.output
    assert "10 waiting" in done.output
