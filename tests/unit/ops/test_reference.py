"""The reference operators against naive formulas, and their row invariance bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from firstlight.ops.reference import ROW_TILE, ReferenceBackend
from firstlight.ops.sigmoid import GRAIN_ELEMENTS
from support.operators import FORMATS, matrix, random_values

OPS = ReferenceBackend("test")
SHAPES = [(1, 1), (3, 5), (16, 32), (65, 33), (192, 576), (576, 1536), (3072, 576), (1000, 2049)]
SCALES = (1e-20, 1.0, 1e15)


def assert_close(got: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    """Relative to the largest value of each row: single values may cancel."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1e-38)  # below it float32 is denormal
    assert float(((got.double() - expected).abs() / size).max()) < relative


def assert_rows_invariant(run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """A row alone, in parts of any size, shuffled, and at another address: always the same bits."""
    whole = run(rows)
    num = len(rows)
    for size in (1, 3, 32, 33):
        parts = torch.cat([run(rows[start : start + size]) for start in range(0, num, size)])
        assert torch.equal(parts, whole), f"in parts of {size}"
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run(rows[order]), whole[order]), "shuffled"
    assert torch.equal(run(rows[1:]), whole[1:]), "at another address"


# --- linear ---


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(shape: tuple[int, int]) -> None:
    values = random_values(*shape, seed=1)
    op = OPS.linear(matrix(values, "F32"), role="layer")
    for scale in SCALES:
        x = random_values(40, shape[1], seed=2, scale=scale)
        assert_close(op(x), x.double() @ values.double().t())
    assert op.num_bytes == values.numel() * 4


@pytest.mark.parametrize("weight_format", FORMATS)
def test_linear_of_every_format_uses_the_exact_values(weight_format: str) -> None:
    stored = matrix(random_values(48, 256, seed=3), weight_format)
    op = OPS.linear(stored, role="layer")
    x = random_values(5, 256, seed=4)
    assert_close(op(x), x.double() @ stored.dequantize().double().t())
    ids = torch.tensor([3, 47, 3])
    rows = op.rows(ids)
    assert rows is not None
    assert torch.equal(rows, stored.dequantize()[ids])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_row_invariant(shape: tuple[int, int]) -> None:
    op = OPS.linear(matrix(random_values(*shape, seed=5), "F32"), role="layer")
    for num in (2 * ROW_TILE, 71):
        assert_rows_invariant(op, random_values(num, shape[1], seed=6))


def test_linear_of_no_rows() -> None:
    op = OPS.linear(matrix(random_values(8, 32), "F32"), role="layer")
    assert op(torch.empty(0, 32)).shape == (0, 8)


# --- norms ---


@pytest.mark.parametrize("width", [1, 2, 63, 64, 576, 577, 4096])
@pytest.mark.parametrize("scale", SCALES)
def test_rms_norm(width: int, scale: float) -> None:
    x, weight = random_values(9, width, seed=7, scale=scale), random_values(width, seed=8)
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(OPS.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not OPS.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("width", [1, 63, 576, 577, 4096])
def test_rms_norm_is_row_invariant(width: int) -> None:
    weight = random_values(width, seed=8)
    assert_rows_invariant(lambda x: OPS.rms_norm(x, weight, 1e-5), random_values(130, width, seed=9))


@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_rms_norm_of_heads_is_row_invariant(size: int) -> None:
    """As q and k are normalised: a part of wider rows, and a weight for each head."""
    weight = random_values(6, size, seed=10)

    def run(x: torch.Tensor) -> torch.Tensor:
        return OPS.rms_norm(x.unflatten(-1, (-1, size))[:, :6], weight, 1e-6)

    x = random_values(70, 8 * size, seed=11)
    assert_rows_invariant(run, x)
    heads = x.unflatten(-1, (-1, size))[:, :6].double()
    expected = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert_close(run(x), expected)


# --- rotary ---


def turns(num: int, size: int) -> torch.Tensor:
    angles = random_values(num, size // 2, seed=12, scale=100.0).double()
    return torch.stack((angles.cos(), angles.sin()), -1).float()


@pytest.mark.parametrize("size", [2, 6, 64, 128])
def test_rotate_turns_pairs_as_complex_numbers(size: int) -> None:
    x, turn = random_values(9, 5, size, seed=13), turns(9, size)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.view_as_complex(turn.double().contiguous())[:, None]
    assert_close(OPS.rotate(x, turn), torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("size", [2, 6, 64])
def test_rotate_is_row_invariant(size: int) -> None:
    turn = turns(70, size)

    def run(x: torch.Tensor) -> torch.Tensor:
        ids = x[:, 0].long()  # the row's number travels with it
        return OPS.rotate(x[:, 1:].unflatten(-1, (-1, size))[:, :3], turn[ids])

    numbers = torch.arange(70.0)[:, None]
    assert_rows_invariant(run, torch.cat((numbers, random_values(70, 4 * size, seed=14)), 1))


# --- gated silu ---


@pytest.mark.parametrize("width", [1, 3, 63, 96, 1536, GRAIN_ELEMENTS + 5])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 60.0])
def test_gated_silu(width: int, scale: float) -> None:
    x = random_values(3, 2 * width, seed=15, scale=scale)
    gate, up = x.double().chunk(2, -1)
    assert_close(OPS.gated_silu(x), gate * torch.sigmoid(gate) * up)


def test_gated_silu_of_extreme_gates() -> None:
    gate = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]])
    out = OPS.gated_silu(torch.cat((gate, torch.ones(1, 5)), 1))
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30]]))


@pytest.mark.parametrize("width", [1, 3, 63, 96, 1536, 2049, GRAIN_ELEMENTS + 5])
def test_gated_silu_is_row_invariant(width: int) -> None:
    num = 130 if width < GRAIN_ELEMENTS else 35
    assert_rows_invariant(OPS.gated_silu, random_values(num, 2 * width, seed=16, scale=3.0))


@pytest.mark.slow
def test_two_threads_change_nothing_about_it() -> None:
    """Where torch shares work out to threads, by rows or by elements."""
    torch.set_num_threads(2)
    linear = OPS.linear(matrix(random_values(1536, 576, seed=5), "F32"), role="layer")
    weight = random_values(576, seed=8)
    assert_rows_invariant(linear, random_values(71, 576, seed=6))
    assert_rows_invariant(lambda x: OPS.rms_norm(x, weight, 1e-5), random_values(130, 576, seed=9))
    assert_rows_invariant(OPS.gated_silu, random_values(130, 2 * 1536, seed=16))
    assert_rows_invariant(OPS.gated_silu, random_values(35, 2 * GRAIN_ELEMENTS + 10, seed=16))


def test_it_reports_what_it_is() -> None:
    assert OPS.row_invariant
    assert OPS.reason == "test"
    assert "nothing rounded" in " ".join(OPS.layout_notes())
