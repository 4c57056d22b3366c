"""Every error that a person meets says what to do about it."""

from __future__ import annotations

import ast

import pytest

from firstlight.base import errors
from shape.source import Module, modules

WITH_REMEDY = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.FirstlightError) and kind is not errors.RequestError
}


def made(module: Module) -> list[ast.Call]:
    """The places where a module makes such an error."""
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WITH_REMEDY
    ]


def has_remedy(call: ast.Call) -> bool:
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "hint")]
    return any(not (isinstance(value, ast.Constant) and not value.value) for value in given)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_an_error_is_made_with_a_remedy(module: Module) -> None:
    silent = [f"{module.shown}:{call.lineno}" for call in made(module) if not has_remedy(call)]
    assert not silent, silent


def test_the_search_finds_errors() -> None:
    assert sum(len(made(module)) for module in modules()) > 100
