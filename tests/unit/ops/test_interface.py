"""The mirror of `native/program.h`: the same as the library says, and a drift is an error that names it."""

from __future__ import annotations

import ctypes
import re

import pytest

from firstlight.base.errors import EngineError
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.ops.cpu.build import SOURCES
from firstlight.ops.cpu.library import Op, Step, mirrored, open_library, require_same
from firstlight.ops.cpu.packed import PACKED, TILE, Layout, formats_here

FACTS = {**mirrored(), **formats_here()}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return open_library()


def test_the_mirror_is_what_the_library_has(library: ctypes.CDLL) -> None:
    require_same(library, FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_each_drift_is_an_error_that_names_it(library: ctypes.CDLL, name: str) -> None:
    with pytest.raises(
        EngineError, match=re.escape(f"{name} is {FACTS[name]} there, {FACTS[name] + 1} here")
    ):
        require_same(library, {name: FACTS[name] + 1})


def test_what_the_library_does_not_know_is_a_drift_too(library: ctypes.CDLL) -> None:
    with pytest.raises(EngineError, match=r"Op\.colour is unknown there"):
        require_same(library, {"Op.colour": 8})


def test_every_field_and_code_of_the_header_is_compared() -> None:
    """A new one shows up here until both sides have it."""
    text = re.sub(r"//.*", "", (SOURCES / "program.h").read_text(encoding="utf-8"))
    codes = {
        name
        for body in re.findall(r"enum \w+ : \w+ \{(.*?)\}", text, re.DOTALL)
        for name in re.findall(r"(\w+) =", body)
    }
    assert codes <= set(FACTS)
    for kind in (Op, Step):
        body = re.search(rf"struct {kind.__name__} \{{(.*?)\}};", text, re.DOTALL)
        assert body is not None
        fields = re.findall(r"(\w+)(?:\[\d+\])?;", body[1])
        assert [field[0] for field in kind._fields_] == fields


@pytest.mark.parametrize("layout", PACKED.values(), ids=lambda layout: layout.name)
def test_a_packed_format_has_the_geometry_of_its_file(layout: Layout) -> None:
    """Scales alone may take more room, where the file packs them closer, or less, where it has 32 bits."""
    geometry = SUPPORTED[layout.name]
    assert layout.block_inputs == geometry.block_values
    assert layout.packed_bytes(TILE, 256) == TILE * 256 // geometry.block_values * layout.block_bytes
    kept = layout.block_bytes - geometry.block_bytes
    assert kept == {"Q4_K": 4, "INT4_ZERO": -4}.get(geometry.name, 0)
