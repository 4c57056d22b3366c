"""One idea a screen: limits on files, functions, parameters and nesting, with a list that may only shrink.

And the other way: a small file that one other of its room uses is a part of that one, and stands in it.
"""

from __future__ import annotations

import ast
import datetime
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shape.source import REPOSITORY, Module, functions, imports, modules

LIMITS = {"file_lines": 300, "function_lines": 60, "parameters": 6, "nesting": 3}
HARD_FILE_LINES = 450  # of one class with its private helpers
SMALL_FILE_LINES = 60
# Lists of entries, each a file of its own: models, formats, causes, collectors, commands, routes.
REGISTRIES = frozenset(
    f"firstlight.{name}"
    for name in (
        "cli.bench",
        "cli.main",
        "doctor.collect.registry",
        "doctor.hypotheses.registry",
        "drafter.explain.collect",
        "models.registry",
        "quant.packings",
        "quant.registry",
        "serve.app",
    )
)
MAX_EXCEPTIONS = 5

Measured = dict[tuple[str, str], int]


def measured() -> Measured:
    """(where, rule) -> size, of everything that has one."""
    return dict(_measure_all())


def _measure_all() -> Iterator[tuple[tuple[str, str], int]]:
    for module in modules():
        if not _is_one_class(module):
            yield (module.shown, "file_lines"), len(module.text.splitlines())
        for function in functions(module):
            where = f"{module.shown}:{function.name}"
            yield (where, "function_lines"), function.lines
            yield (where, "parameters"), function.parameters
            yield (where, "nesting"), function.nesting


def _is_one_class(module: Module) -> bool:
    """One public class, and nothing else that others use."""
    named = [
        node
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    ]
    return len(named) == 1 and isinstance(named[0], ast.ClassDef)


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


def test_a_small_part_stands_in_the_file_that_uses_it() -> None:
    users = defaultdict(set)
    for module in modules():
        for found in imports(module):
            users[found.target].add(module)
    parts = [
        f"{module.shown} ({len(module.text.splitlines())} lines) belongs into {user.shown}"
        for module in modules()
        if module.path.stem != "__init__" and len(module.text.splitlines()) < SMALL_FILE_LINES
        for user in users[module.name]
        if len(users[module.name]) == 1 and user.room == module.room and user.name not in REGISTRIES
    ]
    assert parts == []


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
