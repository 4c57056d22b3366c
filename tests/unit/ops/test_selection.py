"""The largest logits: our own kernels beside PyTorch, with ties, infinities, NaN, and odd widths."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.ops.cpu.library import open_library, open_pool
from firstlight.ops.cpu.native_selection import NativeSelection
from firstlight.ops.selection import TorchSelection


@pytest.fixture(scope="module", params=[1, 2])
def native(request: pytest.FixtureRequest) -> NativeSelection:
    return NativeSelection(open_pool(open_library(), request.param))


def rows(kind: str, width: int) -> torch.Tensor:
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 4.0
    if kind == "ties":
        values = values.round()
    if kind == "zeros":
        values = values.clamp(-1.0, 0.0) * 0.0  # of both signs
    if kind == "falling":
        values = values.sort(descending=True).values
    if kind == "rising":
        values = values.sort().values
    if kind == "infinite":
        values[1] = -math.inf
        values[2, width // 2] = math.inf
        values[3, ::2] = -math.inf
    return values


KINDS = ("plain", "ties", "zeros", "falling", "rising", "infinite")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 8, 63, 1025, 5000])
def test_as_pytorch(native: NativeSelection, kind: str, width: int) -> None:
    logits, chosen, divisors = rows(kind, width), [4, 0, 1, 2], [0.7, 1.0, 1e-6, 3.0]
    assert native.largest(logits) == TorchSelection().largest(logits)
    for num in {1, min(40, width), width}:
        values, ids = native.first(logits, chosen, divisors, num)
        for row, divisor, mine, places in zip(chosen, divisors, values, ids, strict=True):
            expected, order = (logits[row] / torch.tensor([divisor])).sort(descending=True, stable=True)
            assert places.tolist() == order[:num].tolist()
            assert mine.equal(expected[:num])
        for mine, theirs in zip(
            (values, ids), TorchSelection().first(logits, chosen, divisors, num), strict=True
        ):
            assert mine.equal(theirs)


@pytest.mark.parametrize("place", [0, 9, 4999])
def test_a_row_with_a_nan_says_so(native: NativeSelection, place: int) -> None:
    logits = rows("plain", 5000)
    logits[3, place] = math.nan
    for selection in (native, TorchSelection()):
        values, ids = selection.largest(logits)
        assert math.isnan(values[3])
        assert ids[3] == place
        assert not any(math.isnan(value) for value in values[:3])
    _, ids = native.first(logits, [2, 3], [1.0, 1.0], 40)
    assert ids[1, 0] == place
    assert ids[0].tolist() == logits[2].sort(descending=True, stable=True).indices[:40].tolist()
