"""Commands that are printed can be copied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.base.invocation import program


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called firstlight that is not on the path."""
    path = tmp_path / "bin of ours" / "firstlight"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho it is me\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return path


def test_off_the_path_it_is_called_as_we_were(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent.parent)
    shown = program("bin of ours/firstlight")
    assert shown == "'bin of ours/firstlight'"
    assert subprocess.run(["sh", "-c", shown], capture_output=True, check=True).stdout == b"it is me\n"


def test_on_the_path_its_name_is_enough(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}/bin")
    assert program(str(script)) == "firstlight"
    other = script.parent.parent / "firstlight"
    other.write_bytes(script.read_bytes())
    assert program(str(other)) == f"{other}", "another one of that name would answer"


def test_as_a_module_and_inside_another_program() -> None:
    assert program("/somewhere/firstlight/__main__.py") == f"{sys.executable} -m firstlight"
    assert program("/usr/bin/pytest") == "firstlight"
