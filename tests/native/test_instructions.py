"""The native kernels take no more instructions than the stored budget allows: a slower kernel is seen on any
machine, however busy it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firstlight.ops.cpu.library import open_library
from support.instructions import PARTS, build, compiler, count, stored

TOLERANCE = 0.03


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind to count instructions: apt-get install valgrind")
    if not open_library().fl_instruction_sets() & 2:
        pytest.skip("the budget is of the AVX2 kernels, which this processor cannot run")
    if compiler() != stored().compiler:
        pytest.skip(f"the budget is of {stored().compiler}, and this is {compiler() or 'no compiler'}")
    return build(tmp_path_factory.mktemp("count"))


@pytest.mark.parametrize("part", PARTS)
def test_instructions_stay_within_the_budget(program: Path, part: str) -> None:
    allowed, taken = stored().instructions[part], count(program, part)
    assert taken <= allowed * (1 + TOLERANCE), (
        f"{part}: {taken} instructions, {100 * (taken / allowed - 1):.1f} % above the budget of {allowed}. "
        "If the change is worth them, renew the budget with `make instructions`, and say why in the commit."
    )
