"""Documentation, environment variables, and what must not stand in a file that others will read."""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
from collections.abc import Iterator

import pytest

from shape.source import REPOSITORY, Module, modules

# Names that a library or a decorator calls.
CALLED_FROM_OUTSIDE = {
    "_bug",
    "_http_error",
    "_request_error",
    "capture_signals",  # uvicorn
    "reset_parameters",  # torch
    "run_on",  # tests serve on a socket of theirs
    "startup_events",
}

ENVIRONMENT_FILE = "src/firstlight/base/environment.py"
MAX_VARIABLES = 5
SERVICE_MANAGER = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
SYSTEM = {"HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "TMPDIR", "TEMP", "TMP"}  # filled in for libraries
SELF_EXPLAINING_LINES = 6
_CLIENTS = re.compile(r"httpx\.(Async)?Client$|httpx\.(get|post|request|stream)$|urlopen$")
# Written in pieces, so that this file does not contain what it looks for.
FORBIDDEN = tuple(
    "".join(parts)
    for parts in (
        ("/wo", "rk/"),
        ("../sha", "red"),
        ("/opt/wh", "eels"),
        ("/etc/xdg/", "pip"),
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("download.py", "torch.org"),
        ("registry.np", "mjs.org"),
        ("deb.deb", "ian.org"),
        ("/home", "/"),
        ("/root", "/"),
    )
)


def public_definitions(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Public names that need words of their own.

    Not the short ones, which say it themselves; not what implements a `Protocol` of ours, which says it once
    for all; not the only class of a module, which the module's own words describe.
    """
    public = [
        node for node in module.tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_")
    ]
    classes = [node for node in public if isinstance(node, ast.ClassDef)]
    only_class = classes[0] if len(classes) == 1 else None
    for node in public:
        if _is_long(node) and node is not only_class:
            yield node.name, node
    for node in classes:
        if not _is_protocol(node):
            for method in node.body:
                if _needs_words(method):
                    yield f"{node.name}.{method.name}", method  # type: ignore[attr-defined]


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _needs_words(method: ast.stmt) -> bool:
    is_method = isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
    return (
        is_method
        and _is_long(method)
        and not method.name.startswith("_")
        and method.name not in protocol_methods()
    )


@functools.cache
def protocol_methods() -> frozenset[str]:
    """Names of methods that some `Protocol` of ours describes."""
    return frozenset(
        method.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and _is_protocol(node)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    )


def _is_long(node: ast.stmt) -> bool:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1 > SELF_EXPLAINING_LINES


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_what_is_public_is_documented(module: Module) -> None:
    if not module.tree.body:
        return  # an empty __init__
    assert ast.get_docstring(module.tree), f"{module.shown} does not say what it is"
    silent = [name for name, node in public_definitions(module) if not ast.get_docstring(node)]  # type: ignore[arg-type]
    assert silent == [], f"{module.shown} has public names without a docstring"


def test_environment_variables_are_read_in_one_file() -> None:
    readers = [
        f"{module.shown}:{node.lineno}"
        for module in modules()
        if module.shown != ENVIRONMENT_FILE
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "environb", "putenv")
    ]
    assert readers == []


def test_there_are_few_environment_variables() -> None:
    module = next(module for module in modules() if module.shown == ENVIRONMENT_FILE)
    names = {
        node.value.value
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    assert 0 < len(names) <= MAX_VARIABLES
    others = [
        element.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for element in node.value.elts
        if isinstance(element, ast.Constant)
    ]
    assert set(others) == SERVICE_MANAGER | SYSTEM  # docs/decisions.md says why these do not count


def test_clients_of_other_servers_are_made_in_one_file() -> None:
    """Else one of them asks this machine's own server through a proxy."""
    makers = {
        f"{module.shown}: {ast.unparse(node.func)}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _CLIENTS.search(ast.unparse(node.func))
    }
    assert makers == {
        "src/firstlight/serve/http/outgoing.py: httpx.Client",
        # Of the engine behind us, with trust_env off.
        "src/firstlight/serve/foreign/upstream.py: httpx.AsyncClient",
    }


def test_no_file_names_this_machine_or_a_registry() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    found = []
    for name in filter(None, tracked):
        path = REPOSITORY / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        found += [f"{name}: {word}" for word in FORBIDDEN if word.encode() in content]
    assert found == []


def test_a_phase_is_named_by_its_constant() -> None:
    """A misspelt one is an error of the linter, and who asks for a phase is found by its name."""
    stated = next(module for module in modules() if module.name == "firstlight.base.phases")
    phases = {
        node.value.value
        for node in stated.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert "self-test" in phases
    reporters = {"report", "_report", "enter_phase", "_on_phase"}
    literal = [
        f"{module.shown}:{node.lineno}: {ast.unparse(node)[:60]}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in reporters
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    compared = [
        f"{module.shown}:{node.lineno}: {ast.unparse(node)[:60]}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare)
        and "phase" in ast.unparse(node.left)
        and any(
            isinstance(part, ast.Constant) and part.value in phases
            for other in node.comparators
            for part in ast.walk(other)
        )
    ]
    assert literal + compared == []


def test_what_is_defined_is_used() -> None:
    """By its name, somewhere else in the sources; what only tests use belongs to the tests."""
    words = collections.Counter(word for text in _texts() for word in re.findall(r"\w+", text))
    unused = {
        f"{module.shown}: {name}"
        for module in modules()
        for name in _defined(module.tree)
        if words[name] == 1 and name not in CALLED_FROM_OUTSIDE
    }
    assert unused == set()


def _texts() -> Iterator[str]:
    yield from (module.text for module in modules())
    for pattern in ("benchmarks/**/*.py", "src/**/*.yaml", "pyproject.toml", "setup.py"):
        yield from (path.read_text(encoding="utf-8") for path in REPOSITORY.glob(pattern))


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_named and not node.name.startswith("__"):
            yield node.name
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


_CALLERS = re.compile(
    r"(?:^|[.:;] )(?:Called|Used|Read|Made|Owned|Imported|Fed|Filled|Driven|Asked) by ", re.MULTILINE
)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_does_not_say_who_uses_it(module: Module) -> None:
    """It was wrong in a score of places, because nobody looks there when a caller comes or goes."""
    told = " ".join((ast.get_docstring(module.tree) or "").split())
    assert _CALLERS.findall(told) == []
