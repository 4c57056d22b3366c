"""Who may import whom: only downward, no cycles, and no torch where none is wanted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from shape.source import LAYERS, OUTSIDE, REPOSITORY, Module, imports, modules

# Rooms, and modules of other rooms, after whose import `torch` must not be loaded.
TORCH_FREE_ROOMS = ("base", "facts", "text", "serve", "doctor", "launch", "cli")
TORCH_FREE_MODULES = (
    "firstlight",
    *(f"firstlight.engine.{name}" for name in ("channel", "messages", "params")),
)
TORCH_FREE_WINGS = ("firstlight.engine.scheduler",)


def room_of(target: str) -> str:
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def torch_free() -> list[str]:
    return [
        module.name
        for module in modules()
        if module.room in TORCH_FREE_ROOMS
        or module.name in TORCH_FREE_MODULES
        or module.name.startswith(TORCH_FREE_WINGS)
    ]


def test_what_is_torch_free_is_there() -> None:
    assert set(TORCH_FREE_MODULES) < set(torch_free())
    assert all(any(name.startswith(wing) for name in torch_free()) for wing in TORCH_FREE_WINGS)


def test_every_room_has_its_place() -> None:
    assert {module.room for module in modules()} - {*LAYERS, *OUTSIDE} == set()


def test_the_map_of_rooms_is_that_of_the_layers() -> None:
    """docs/design.md tells newcomers which rooms there are, top to bottom."""
    text = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)(?:\.py)?` \|", text, re.MULTILINE)
    assert rows == list(LAYERS)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_down(module: Module) -> None:
    if module.room in OUTSIDE:
        return
    place = LAYERS.index(module.room)
    upward = [
        f"line {found.line}: {found.target}"
        for found in imports(module)
        if room_of(found.target) not in OUTSIDE and LAYERS.index(room_of(found.target)) < place
    ]
    assert upward == [], f"{module.shown} imports from rooms above {module.room}"


def test_there_is_no_cycle() -> None:
    """Nor one of which a part is followed by the type checker alone: such files cannot be read apart."""
    edges = {module.name: {found.target for found in imports(module)} for module in modules()}
    seen: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name not in seen:
            for target in sorted(edges.get(name, ())):
                visit(target, (*path, name))
            seen.add(name)

    for name in edges:
        visit(name, ())


def test_the_cli_is_imported_by_nobody() -> None:
    importers = [
        module.shown
        for module in modules()
        if module.room not in ("cli", "__main__")
        for found in imports(module)
        if room_of(found.target) == "cli"
    ]
    assert importers == []


def test_torch_is_not_loaded_where_it_is_not_wanted() -> None:
    """All at once in one fresh interpreter; only on failure is the culprit looked for one by one."""
    names = torch_free()
    if _loads_torch(names):
        culprits = [name for name in names if _loads_torch([name])]
        pytest.fail(f"torch is loaded by importing: {', '.join(culprits)}")


def _loads_torch(names: list[str]) -> bool:
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"
