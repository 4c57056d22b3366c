"""The program from outside: help, versions, what `env` and `serve` make of their flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firstlight import __version__
from firstlight.cli.main import make_app
from firstlight.launch.serve import Order

runner = CliRunner()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """Orders that would have been launched."""
    orders: list[Order] = []
    monkeypatch.setattr("firstlight.launch.serve.serve", lambda order, *_, **__: orders.append(order))
    monkeypatch.delenv("FIRSTLIGHT_API_KEY", raising=False)
    return orders


def test_every_command_teaches_by_example() -> None:
    for command in make_app().registered_commands:
        assert command.epilog is not None
        assert f"firstlight {command.name}" in command.epilog
        assert command.help


def test_the_version() -> None:
    assert runner.invoke(make_app(), ["--version"]).output == f"firstlight {__version__}\n"


def test_help_loads_neither_torch_nor_the_rooms_below() -> None:
    script = (
        "import sys; from firstlight.cli import main\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('firstlight.')}\n"
        "print(sorted(rooms), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "['base', 'cli'] False False\n"


def test_flags_beat_the_file(order: list[Order], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "from/file"\nport = 9000\nmax-choices = 3\napi-key = ["a", "b"]\ndebug = true\n')
    assert runner.invoke(make_app(), ["serve", "--config", str(file), "--port", "9001"]).exit_code == 0
    server = order[0].resolved.server
    assert (server.port, server.max_choices) == (9001, 3)
    assert (order[0].model, order[0].api_keys, order[0].debug) == ("from/file", ("a", "b"), True)


def test_keys_come_from_flag_file_and_environment(
    order: list[Order], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\ntwo\n\nthree\n")
    monkeypatch.setenv("FIRSTLIGHT_API_KEY", "four,two")
    runner.invoke(make_app(), ["serve", "m", "--api-key", "one", "--api-key-file", str(keys)])
    assert order[0].api_keys == ("one", "two", "three", "four")


def test_an_empty_key_file_does_not_open_the_server(order: list[Order], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    result = runner.invoke(make_app(), ["serve", "--api-key-file", str(tmp_path / "keys")])
    assert (result.exit_code, order) == (2, [])
    assert "holds no API key" in result.stderr


def test_a_bad_value_is_a_usage_error(order: list[Order]) -> None:
    result = runner.invoke(make_app(), ["serve", "--memory-fraction", "7"])
    assert (result.exit_code, order) == (2, [])
    assert "memory-fraction in the flags is 7.0, but must be at most 0.98" in result.stderr


def test_env_says_what_will_be_used_and_why() -> None:
    result = runner.invoke(make_app(), ["env", "--tensor-parallel", "2"])
    assert result.exit_code == 0
    assert "threads: " in result.output
    assert "divided by 2 rank(s)" in result.output


def test_env_as_json() -> None:
    shown = json.loads(runner.invoke(make_app(), ["env", "--json"]).output)
    assert shown["firstlight"] == __version__
    assert {"device", "memory", "threads"} <= {use["name"] for use in shown["uses"]}


def test_convert_refuses_an_existing_folder_before_it_loads_anything(tmp_path: Path) -> None:
    result = runner.invoke(make_app(), ["convert", "model.gguf", str(tmp_path)])
    assert result.exit_code == 2
    assert "exists already" in result.stderr


def test_convert_names_what_is_not_there(tmp_path: Path) -> None:
    result = runner.invoke(make_app(), ["convert", "./none.gguf", str(tmp_path / "new")])
    assert result.exit_code == 3
    assert "does not exist" in result.stderr
