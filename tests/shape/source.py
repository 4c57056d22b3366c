"""The source tree as the shape tests see it: files, imports, functions and their sizes, by AST.

Invariant: nothing of firstlight is imported here, so that a broken room cannot hide from its own test.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "firstlight"

# Top to bottom: a room imports only from rooms below it and from its own. "llm" is the module llm.py.
LAYERS = (
    "cli",
    "bench",
    "drafter",
    "launch",
    "doctor",
    "llm",
    "serve",
    "engine",
    "text",
    "models",
    "loading",
    "quant",
    "ops",
    "facts",
    "base",
)
# The package itself (its version, its lazy names) and `python -m firstlight` stand outside of the layers.
OUTSIDE = ("__init__", "__main__")
# What branches, repeats or catches is nesting. A `with` is looked into, but is none: it always runs once.
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
_TRANSPARENT = (ast.With, ast.AsyncWith)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted, as in an import."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room that the module stands in."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def shown(self) -> str:
        """The path as a person writes it."""
        return self.path.relative_to(REPOSITORY).as_posix()


@dataclass(frozen=True)
class Import:
    """One import of a module of ours; those that only the type checker follows count too."""

    target: str
    line: int


@dataclass(frozen=True)
class Function:
    """One function or method, with what is measured of it."""

    name: str
    node: FunctionNode
    lines: int
    parameters: int
    nesting: int


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every source file of the package."""
    return tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")))


def _read(path: Path) -> Module:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    text = path.read_text(encoding="utf-8")
    return Module(path, ".".join(parts), text, ast.parse(text, str(path)))


def imports(module: Module) -> Iterator[Import]:
    """The imports of modules of ours, wherever they stand."""
    names = {other.name for other in modules()}
    yield from _imports_in(module.tree, names)


def _imports_in(node: ast.AST, names: set[str]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "firstlight":
                    yield Import(alias.name, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative imports are not used here"
            if child.module and child.module.split(".")[0] == "firstlight":
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield Import(whole if whole in names else child.module, child.lineno)
        else:
            yield from _imports_in(child, names)


def functions(module: Module) -> Iterator[Function]:
    """Every function and method, nested ones too; a name is "Class.method" or "outer.inner"."""
    yield from _functions_in(module.tree, "")


def _functions_in(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield _measure(child, prefix)
        inner = prefix
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            inner = f"{prefix}{child.name}."
        yield from _functions_in(child, inner)


def _measure(node: FunctionNode, prefix: str) -> Function:
    every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    parameters = [argument for argument in every if argument.arg not in ("self", "cls")]
    assert node.end_lineno is not None
    return Function(
        name=prefix + node.name,
        node=node,
        lines=node.end_lineno - node.lineno + 1,
        parameters=len(parameters),
        nesting=_nesting(node.body),
    )


def _nesting(body: list[ast.stmt]) -> int:
    """How deep blocks stand in each other; functions inside are measured on their own."""
    deepest = 0
    for statement in body:
        if isinstance(statement, _TRANSPARENT):
            deepest = max(deepest, _nesting(statement.body))
        if not isinstance(statement, _BLOCKS):
            continue
        inner = max((_nesting(part) for part in _bodies(statement)), default=0)
        deepest = max(deepest, 1 + inner)
        if isinstance(statement, ast.If) and _is_elif(statement):
            deepest = max(deepest, _nesting(statement.orelse))
    return deepest


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, ast.Match):
        return [case.body for case in statement.cases]
    bodies = [getattr(statement, "body", []), getattr(statement, "finalbody", [])]
    bodies += [handler.body for handler in getattr(statement, "handlers", [])]
    if not (isinstance(statement, ast.If) and _is_elif(statement)):
        bodies.append(getattr(statement, "orelse", []))
    return bodies


def _is_elif(statement: ast.If) -> bool:
    return len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
