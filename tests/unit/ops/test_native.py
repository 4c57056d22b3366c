"""Our own CPU kernels through their backend: against the reference, bits of rows, and what is not a number.

`tests/native/fuzz.cpp` does the same on random shapes, in C++ and under the sanitizers.
"""

from __future__ import annotations

import pytest
import torch

from firstlight.ops.contract import AttentionShape, MatrixKind
from firstlight.ops.cpu.library import LARGEST, Op, Step, address
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.reference import ReferenceBackend
from support.native_sets import instruction_sets, pool_of
from support.operators import FORMATS, NESTED, PLAIN, SAFETENSORS, Paged, matrix, random_values

REFERENCE = ReferenceBackend("test")
SHAPES = ((96, 128), (13, 64), (1, 32), (200, 576))
NESTED_SHAPES = ((96, 512), (13, 256), (1, 768))
ODD_SHAPES = ((1, 1), (3, 5), (65, 33), (17, 201))  # for formats without blocks
ROWS = (1, 2, 3, 4, 5, 8, 33, 64, 65, 130)
# Codes of 8 bits for all but the largest of 32 values; sums over a few hundred inputs.
PRODUCT_TOLERANCE = {"F32": 1e-6, "F16": 1e-6, "BF16": 1e-6, "Q8_0": 8e-3, "Q4_0": 8e-3, "Q4_1": 8e-3}
PRODUCT_TOLERANCE |= {"Q4_K": 8e-3, "Q6_K": 8e-3, "INT4": 8e-3, "INT4_ZERO": 8e-3, "INT8": 8e-3}
PRODUCT_TOLERANCE |= {"FP8": 1e-6, "FP4": 1e-6}


@pytest.fixture(scope="module", params=instruction_sets())
def ops(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(pool_of(request.param))


def shapes_of(weight_format: str) -> tuple[tuple[int, int], ...]:
    if weight_format in NESTED:
        return NESTED_SHAPES
    return SHAPES + ODD_SHAPES if weight_format in PLAIN else SHAPES


@pytest.mark.parametrize("weight_format", FORMATS)
def test_products(ops: NativeBackend, weight_format: str) -> None:
    for shape in shapes_of(weight_format):
        weight = matrix(random_values(*shape, seed=1, scale=0.05), weight_format)
        op = ops.linear(weight, role="layer")
        dense = weight.dequantize()
        assert torch.equal(op.rows(torch.arange(shape[0])), dense), shape
        assert op.num_bytes == ops.resident_bytes(MatrixKind("layer", weight_format, shape))
        x = random_values(max(ROWS), shape[1], seed=3)
        all_rows = op(x)
        expected = x.double() @ dense.double().t()
        error = float((all_rows - expected).abs().max() / expected.abs().max())
        assert error < PRODUCT_TOLERANCE[weight_format], shape
        for num in ROWS:
            assert torch.equal(op(x[:num]), all_rows[:num]), (shape, num)
            assert torch.equal(op(x[num - 1 : num]), all_rows[num - 1 : num]), (shape, num)


@pytest.mark.parametrize("weight_format", ["Q8_0", "Q4_0", "Q4_1", *NESTED, *SAFETENSORS])
def test_an_outlier_does_not_coarsen_its_group(ops: NativeBackend, weight_format: str) -> None:
    weight = matrix(random_values(64, 256, seed=1, scale=0.05), weight_format)
    x = random_values(3, 256, seed=4)
    x[:, 17] = 100.0
    x[1, 99] = -3e4
    expected = x.double() @ weight.dequantize().double().t()
    rest = x.double().clone()
    rest[:, 17] = rest[1, 99] = 0.0
    size = float((rest @ weight.dequantize().double().t()).abs().max())
    error = (ops.linear(weight, role="layer")(x) - expected).abs().amax(1)
    assert float(error[0]) < 0.02 * size
    assert float(error[1]) < 0.3 * size  # 16 bits of 3e4 are steps of one


@pytest.mark.parametrize("weight_format", FORMATS)
def test_extreme_inputs(ops: NativeBackend, weight_format: str) -> None:
    width = 256 if weight_format in NESTED else 64
    op = ops.linear(matrix(random_values(24, width, seed=1, scale=0.05), weight_format), role="layer")
    assert not op(torch.zeros(3, width)).any()
    for size in (1e30, 1e-30, -1e-38):
        assert bool(torch.isfinite(op(torch.full((3, width), size))).all())
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = random_values(5, width, seed=2)
        clean = op(x)
        x[2, 40] = bad
        out = op(x)
        assert not bool(torch.isfinite(out[2]).any()), bad
        assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("width", [1, 7, 8, 63, 576, 1536])
def test_operators_of_rows(ops: NativeBackend, width: int) -> None:
    x, weight = random_values(9, width, seed=4, scale=3.0), random_values(width, seed=5)
    normed = ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, REFERENCE.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    both = random_values(9, 2 * width, seed=6, scale=3.0)
    gated = ops.gated_silu(both)
    torch.testing.assert_close(gated, REFERENCE.gated_silu(both), rtol=1e-5, atol=1e-6)
    for row in range(9):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(ops.gated_silu(both[row : row + 1])[0], gated[row])
    x[3, width // 2] = torch.nan
    both[3, width] = torch.nan
    assert bool(torch.isnan(ops.rms_norm(x, weight, 1e-5)[3]).all())
    assert bool(torch.isnan(ops.gated_silu(both)[3, 0]))


def test_the_largest_of_each_row(ops: NativeBackend) -> None:
    x = random_values(6, 1003, seed=8)
    x[2, [5, 700]] = 9.0
    x[3, 400] = torch.nan
    x[4] = -torch.inf
    where, value = torch.empty(6, dtype=torch.int64), torch.empty(6)
    op = Op(LARGEST, n=(x.shape[1],), p=(address(x), address(where), address(value)))
    ops.pool.run([op], Step(num_rows=6))
    expected = x.max(-1)
    assert where.tolist() == [*expected.indices[:2].tolist(), 5, 400, 0, int(expected.indices[5])]
    torch.testing.assert_close(value, expected.values, equal_nan=True)


@pytest.mark.parametrize("window", [None, 1, 40, 64, 100])
@pytest.mark.parametrize(("heads", "size"), [((9, 3), 64), ((2, 2), 16), ((8, 1), 80), ((3, 3), 6)])
def test_attention(ops: NativeBackend, heads: tuple[int, int], size: int, window: int | None) -> None:
    lengths = (130, 40, 1, 200, 64, 33)
    paged = Paged.random(AttentionShape(*heads, size, window), lengths, seed=3)
    keys, values = paged.keys.half(), paged.values.half()
    paged = Paged(paged.shape, paged.page_size, paged.tables_SP, keys.float(), values.float())
    entries = [(0, 0, 130), (3, 199, 1), (1, 3, 37), (2, 0, 1), (4, 63, 1), (5, 0, 33)]
    rows = paged.rows(entries)
    q = random_values(len(rows.positions_T), heads[0], size, seed=9)
    got = ops.attend(q, keys, values, ops.plan_attention(rows, paged.shape))
    sequences = [entry[0] for entry in entries for _ in range(entry[2])]
    for row, position in enumerate(rows.positions_T.tolist()):
        alone = paged.rows([(sequences[row], position, 1)])
        plan = ops.plan_attention(alone, paged.shape)
        assert torch.equal(ops.attend(q[row : row + 1], keys, values, plan)[0], got[row])
        if row % 7 == 0:
            expected = paged.naive(q[row], sequences[row], position)
            assert float((got[row].double() - expected).abs().max()) < 2e-5


def test_attention_reads_nothing_that_a_row_may_not_see(ops: NativeBackend) -> None:
    paged = Paged.random(AttentionShape(4, 2, 16, None), (70, 35))
    keys, values = paged.keys.half(), paged.values.half()
    rows = paged.rows([(0, 5, 60), (1, 33, 1)])
    q = random_values(61, 4, 16)
    plan = ops.plan_attention(rows, paged.shape)
    expected = ops.attend(q, keys, values, plan)
    seen = torch.zeros(len(keys), dtype=torch.bool)
    for sequence, length in ((0, 65), (1, 34)):
        for position in range(length):
            page = int(paged.tables_SP[sequence, position // paged.page_size])
            seen[page * paged.page_size + position % paged.page_size] = True
    keys[~seen], values[~seen] = torch.nan, torch.nan
    assert torch.equal(ops.attend(q, keys, values, plan), expected)


def test_rotate_equals_the_reference_bit_for_bit(ops: NativeBackend) -> None:
    x = random_values(5, 6 * 64, seed=8).unflatten(-1, (-1, 64))
    angles = random_values(5, 32, seed=9)
    turn = torch.stack((angles.cos(), angles.sin()), -1)
    assert torch.equal(ops.rotate(x, turn), REFERENCE.rotate(x, turn))
