"""The short form of `make patients`: each quick kind once, two at a time.

The long form draws several seeds of every kind and prints the confusion matrix. What this machine cannot have
is printed with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from patients.kinds import KINDS
from patients.models import SHARDED, TINY, provide
from patients.one import Result
from patients.run import Order, run_order

QUICK = [name for name, kind in KINDS.items() if kind.is_quick]
Results = dict[str, tuple["Future[list[Result]]", Callable[[], list[Result]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("patients")
    models = provide(folder / "models", TINY, SHARDED)
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            name: (
                pool.submit(run_order, Order(name, 0, by_command=True), models, _cases(folder)),
                partial(run_order, Order(name, 1, by_command=True), models, _cases(folder)),
            )
            for name in QUICK
        }


def _cases(folder: Path) -> Path:
    return folder / "cases"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", QUICK)
def test_the_first_verdict_is_right(name: str, results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = results[name]
    (result,) = first.result()
    if result.missing:
        _say(capsys, f"{name} was not run: {result.missing}")
        return
    if result.error or not result.is_right:
        # A crowded machine spoils a look now and then; how often is what the long form counts.
        _say(capsys, f"{name} is made once more: {_what(result)}")
        (result,) = again()
    assert not result.error
    assert result.is_right, _what(result)


def _what(result: Result) -> str:
    return result.error or f"{result.wrong} wrong: {result.condition}/{result.cause}: {result.summary}"


def _say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def test_there_are_enough_kinds() -> None:
    healthy = [kind for kind in KINDS.values() if kind.is_healthy]
    assert len(KINDS) >= 30
    assert len(healthy) >= 8
    assert len(QUICK) >= 15
