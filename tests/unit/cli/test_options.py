"""The error boundary, and flags made from the table of settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from firstlight.base.errors import ModelFileError, RequestError, ResourceError
from firstlight.base.resolve_config import Given
from firstlight.base.settings import ALL_SETTINGS
from firstlight.cli.options import Debug, add_command, guarded


@dataclass
class Options:
    """What the test command takes."""

    word: str = "x"
    debug: Debug = False


def run(arguments: list[str]) -> tuple[Options, Given]:
    """What a command with all settings receives for these arguments."""
    received: list[tuple[Options, Given]] = []

    def probe(options: Options, flags: Given) -> int:
        """Probe.

        Examples:
          probe [something]
        """
        received.append((options, flags))
        return 7

    app = typer.Typer(rich_markup_mode="rich")
    add_command(app, probe, settings=ALL_SETTINGS)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7, result.output
    return received[0]


def test_only_flags_that_were_given_are_handed_on() -> None:
    options, flags = run(["--port", "9", "--no-prefix-cache", "--kv-memory", "2G", "--served-name", "a"])
    assert options == Options()
    assert flags.values == {"port": 9, "prefix-cache": False, "kv-memory": "2G", "served-name": ["a"]}


def test_nothing_given_is_nothing() -> None:
    assert run(["--word", "y"]) == (Options(word="y"), Given({}, "the flags"))


@contextmanager
def raising(error: BaseException) -> Iterator[None]:
    raise error
    yield


def code_of(error: BaseException, *, debug: bool = False) -> int:
    def fail() -> int:
        with raising(error):
            return 0

    return guarded(fail, debug=debug)


def test_an_error_of_ours_is_its_message_hint_and_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(ModelFileError("it is cut short", "fetch it again")) == 3
    assert capsys.readouterr().err == "error: it is cut short.\n  what to do: fetch it again\n"


def test_a_refused_request_is_a_usage_error() -> None:
    assert code_of(RequestError("temperature is -1", param="temperature")) == 2


def test_anything_else_is_called_a_bug_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(ZeroDivisionError("by zero")) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ZeroDivisionError: by zero\n")
    assert "--debug" in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code_of(ZeroDivisionError("by zero"), debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_its_own_code() -> None:
    assert code_of(KeyboardInterrupt()) == 130


@pytest.mark.parametrize("arguments", [["ps"], ["--help"], ["doctor", "--help"]])
def test_a_full_disk_behind_the_output_is_said(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "firstlight", *arguments]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == ResourceError.exit_code
    assert done.stderr.startswith("error: the output could not be written: No space left on device.")
    assert "Traceback" not in done.stderr
