"""One idea a screen: limits on files, functions, parameters and nesting, with a list that may only shrink."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator
from pathlib import Path

from shape.source import REPOSITORY, functions, modules

LIMITS = {"file_lines": 300, "function_lines": 60, "parameters": 6, "nesting": 3}
HARD_FILE_LINES = 400
MAX_EXCEPTIONS = 5

Measured = dict[tuple[str, str], int]


def measured() -> Measured:
    """(where, rule) -> size, of everything that has one."""
    return dict(_measure_all())


def _measure_all() -> Iterator[tuple[tuple[str, str], int]]:
    for module in modules():
        yield (module.shown, "file_lines"), len(module.text.splitlines())
        for function in functions(module):
            where = f"{module.shown}:{function.name}"
            yield (where, "function_lines"), function.lines
            yield (where, "parameters"), function.parameters
            yield (where, "nesting"), function.nesting


def exceptions() -> list[dict[str, object]]:
    content = tomllib.loads(Path(__file__).with_name("exceptions.toml").read_text())
    return content.get("exception", [])


def test_nothing_is_larger_than_the_rules_allow() -> None:
    excused = {(entry["where"], entry["rule"]): entry["size"] for entry in exceptions()}
    too_large = [
        f"{where}: {rule} is {size}, at most {excused.get((where, rule), LIMITS[rule])}"
        for (where, rule), size in measured().items()
        if size > int(str(excused.get((where, rule), LIMITS[rule])))
    ]
    assert too_large == []


def test_no_file_passes_the_hard_limit() -> None:
    """Not by way of an exception, and no test file either."""
    too_long = [
        path.relative_to(REPOSITORY).as_posix()
        for folder in ("src", "tests")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if len(path.read_text().splitlines()) > HARD_FILE_LINES
    ]
    assert too_long == []


def test_exceptions_only_shrink() -> None:
    sizes = measured()
    for entry in exceptions():
        key = (str(entry["where"]), str(entry["rule"]))
        assert sizes.get(key) == entry["size"], (
            f"{key} is {sizes.get(key)} now: update or remove its exception"
        )
        assert sizes[key] > LIMITS[key[1]], f"{key} needs no exception any more"
        assert isinstance(entry["since"], datetime.date)
        assert entry["why"]
    assert len(exceptions()) <= MAX_EXCEPTIONS
