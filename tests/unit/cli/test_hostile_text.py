"""Bytes that are no text, and keys that are none: a clear refusal with exit code 2, never "this is a bug"."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.base import environment
from firstlight.base.errors import UsageError, is_text
from firstlight.cli.keys import gather_keys
from firstlight.cli.prompts_file import read_prompts
from firstlight.serve.http.logs import TextFormatter

SOURCES = Path(__file__).parents[3] / "src"


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_does_not_open_the_server(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.API_KEY, raising=False)
    with pytest.raises(UsageError, match="open to everyone"):
        gather_keys([key, "good"], None)


def test_a_variable_of_commas_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.API_KEY, " , ")
    with pytest.raises(UsageError, match=environment.API_KEY):
        gather_keys([], None)


def test_a_comment_in_a_key_file_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.API_KEY, raising=False)
    (tmp_path / "keys").write_text("  # a comment\nkey\n")
    assert gather_keys([], tmp_path / "keys") == ("key",)


@pytest.mark.parametrize(
    "arguments",
    [["run", b"\xff\xfe"], ["run", "--system", b"\xff", "hi"], ["serve", "--served-name", b"\xff"]],
)
def test_arguments_that_are_no_text(arguments: list[str | bytes]) -> None:
    command = [sys.executable, "-m", "firstlight", *arguments]
    environment_ = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=environment_, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"is not valid UTF-8" in done.stderr
    assert b"bug" not in done.stderr


def test_a_prompt_with_half_a_pair() -> None:
    assert not is_text("\ud800")
    with pytest.raises(UsageError, match="line 1 of x has half of a surrogate pair"):
        read_prompts(['{"prompt": "\\ud800"}'], "x")


def test_a_client_cannot_forge_a_line_of_the_log() -> None:
    formatter = TextFormatter("%(levelname)s %(name)s: %(message)s")
    path = "/a\n2026-11-29 INFO forged\x1b[31mred\x00"
    record = logging.LogRecord("firstlight.access", logging.INFO, "", 0, "GET %s 404", (path,), None)
    line = formatter.format(record)
    assert line == "INFO firstlight.access: GET /a\\n2026-11-29 INFO forged\\x1b[31mred\\x00 404"
