"""Instruction sets agree with each other, and one that computes wrongly is not used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from firstlight.ops.cpu import check
from firstlight.ops.cpu.library import INSTRUCTION_SETS, PORTABLE, Pool, open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend
from support.emulated import emulated_library
from support.operators import FORMATS, matrix, random_values

LIBRARY = open_library()
FAST = [
    number for number in INSTRUCTION_SETS if number != PORTABLE and LIBRARY.fl_instruction_sets() & number
]


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    check.confirmed_set.cache_clear()
    yield
    check.confirmed_set.cache_clear()


def test_the_best_set_of_this_machine_is_confirmed() -> None:
    assert check.confirmed_set(LIBRARY) == (max(FAST, default=PORTABLE), "")


def test_the_emulated_code_passes_the_check() -> None:
    library = emulated_library()
    best = max(n for n in INSTRUCTION_SETS if n < 4 and library.fl_instruction_sets() & n)
    assert check.first_difference(library, best) is None


@pytest.mark.parametrize("place", range(30))
def test_a_set_that_is_wrong_anywhere_is_not_used(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.results
    wrong = set(FAST)
    spoilt: list[str] = []

    def spoil(pool: Pool) -> Iterator[tuple[str, torch.Tensor]]:
        for at, (name, result) in enumerate(real(pool)):
            if at == place and pool.instruction_set in wrong:
                result.view(-1)[-1] += 1
                spoilt.append(name)
            yield name, result

    monkeypatch.setattr(check, "results", spoil)
    number, note = check.confirmed_set(LIBRARY)
    assert number == PORTABLE
    for each in FAST:
        assert f"{INSTRUCTION_SETS[each]} computes wrongly on this machine ({spoilt[0]})" in note
    wrong -= {min(FAST, default=0)}
    check.confirmed_set.cache_clear()
    assert check.confirmed_set(LIBRARY)[0] == min(FAST, default=PORTABLE)


def test_the_reason_says_what_was_not_confirmed() -> None:
    backend = NativeBackend(open_pool(LIBRARY, 1, instruction_set=PORTABLE), "AVX2 computes wrongly")
    assert backend.reason.endswith("our own kernels for portable, 1 threads; AVX2 computes wrongly")


@pytest.mark.parametrize("weight_format", FORMATS)
def test_sets_with_fused_operations_agree_in_every_bit(weight_format: str) -> None:
    weight = matrix(random_values(43, 512, seed=1, scale=0.05), weight_format)
    x = random_values(19, 512, seed=2)
    pools = [open_pool(LIBRARY, 1, instruction_set=number) for number in FAST]
    if FAST:
        pools.append(open_pool(emulated_library(), 1, instruction_set=2))
    results = [NativeBackend(pool).linear(weight, role="layer")(x) for pool in pools]
    for result in results:
        assert torch.equal(result, results[0])
    portable = NativeBackend(open_pool(LIBRARY, 1, instruction_set=PORTABLE)).linear(weight, role="layer")(x)
    for result in results:
        torch.testing.assert_close(result, portable, rtol=0, atol=2e-6 * float(portable.abs().max()))
