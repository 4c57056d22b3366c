"""Counted imports, and modules that are put off until they are used."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import pytest

from firstlight.base.imports import counted_imports, put_off


class _Steps:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, str]] = []
        self.count = 0

    def enter_phase(self, name: str, total: int = 0, unit: str = "", detail: str = "") -> None:
        self.phases.append((name, detail))

    def advance(self, done: int) -> None:
        self.count = done


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that nobody has imported, with a module inside it."""
    folder = tmp_path / "put_off_example"
    folder.mkdir()
    (folder / "__init__.py").write_text("ANSWER = 42\n")
    (folder / "inner.py").write_text("from put_off_example import ANSWER\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "put_off_example"
    for name in [name for name in sys.modules if name.startswith("put_off_example")]:
        del sys.modules[name]


def test_imports_move_the_odometer_and_are_not_searched_for_garbage(package: str) -> None:
    steps = _Steps()
    with counted_imports(steps, "an example"):
        assert not gc.isenabled()
        importlib.import_module(package)
    assert gc.isenabled()
    assert steps.phases == [("imports", "an example")]
    assert steps.count >= 1


def test_what_is_put_off_is_not_run_until_a_name_of_it_is_used(package: str) -> None:
    put_off(package)
    module = importlib.import_module(package)
    assert "ANSWER" not in vars(module)
    assert module.ANSWER == 42
    assert sys.modules[package] is not module
    assert module.ANSWER == 42  # who has kept the stand-in is served, too
    with pytest.raises(AttributeError):
        _ = module.nothing_of_that_name


def test_a_module_inside_what_is_put_off_is_found(package: str) -> None:
    put_off(package)
    assert importlib.import_module(f"{package}.inner").ANSWER == 42


def test_what_is_there_already_stays(package: str) -> None:
    module = importlib.import_module(package)
    put_off(package)
    assert sys.modules[package] is module
