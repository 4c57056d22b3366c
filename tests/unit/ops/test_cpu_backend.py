"""The fast CPU operators against the reference: each layout of each format within its stated rounding."""

from __future__ import annotations

import pytest
import torch

from firstlight.models.layers.linear import StoredMatrix
from firstlight.ops.contract import MatrixKind
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.layouts import (
    BITS_PER_VALUE,
    GROUP,
    STOCK_LAYOUTS,
    TwoLayouts,
    allowed,
    padded_rows,
    weight_error,
)
from firstlight.ops.cpu.select import Choice
from firstlight.ops.reference import ReferenceBackend
from support.operators import FORMATS, matrix, random_values

FAST, REFERENCE = CpuBackend("test"), ReferenceBackend("test")
SHAPE = (96, 256)  # whole blocks of every format
ROWS = (1, 2, 3, 8, 31, 64, 130)

# Largest error of a product, as a share of the largest output, from the rounding that each layout states:
# fp16 rounds weights to 11 bits; bf16 weights, inputs and outputs to 8; int4 scales, inputs and outputs to 8.
PRODUCT_TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1.5e-2, "int4": 1.5e-2}
# Largest error of a weight, as a share of the largest weight, by layout.
WEIGHT_TOLERANCE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int4": 2.0**-7}
EXACT = {("F16", "fp16"), ("BF16", "bf16")}
CASES = [(f, name) for f in FORMATS for name in allowed(f, SHAPE)]


def stored(weight_format: str, shape: tuple[int, int] = SHAPE) -> StoredMatrix:
    return matrix(random_values(*shape, seed=1, scale=0.05), weight_format)


@pytest.mark.parametrize(("weight_format", "name"), CASES)
def test_products_are_within_the_layout_s_rounding(weight_format: str, name: str) -> None:
    weight = stored(weight_format)
    op = STOCK_LAYOUTS[name](weight)
    exact = weight.dequantize().double()
    for num in ROWS:
        x = random_values(num, SHAPE[1], seed=num)
        expected = x.double() @ exact.t()
        error = float((op(x).double() - expected).abs().max() / expected.abs().max())
        assert error < PRODUCT_TOLERANCE[name], f"{num} rows"


@pytest.mark.parametrize(("weight_format", "name"), CASES)
def test_the_reported_weight_error_is_the_one_that_the_operator_makes(weight_format: str, name: str) -> None:
    weight = stored(weight_format)
    exact = weight.dequantize()
    reported = weight_error(name, weight)
    assert reported <= WEIGHT_TOLERANCE[name]
    if (weight_format, name) in EXACT:
        assert reported == 0.0
    # The product with the unit matrix hands out the weights in use; 16-bit results are rounded again.
    used = STOCK_LAYOUTS[name](weight)(torch.eye(SHAPE[1])).float().t()
    measured = float((used - exact).abs().max() / exact.abs().max())
    slack = 2.0**-8 if name == "int4" else 1e-6
    assert measured == pytest.approx(reported, abs=slack)


@pytest.mark.parametrize("name", STOCK_LAYOUTS)
def test_extreme_inputs_stay_finite(name: str) -> None:
    if name not in allowed("Q4_1", SHAPE):
        return
    op = STOCK_LAYOUTS[name](stored("Q4_1"))
    assert not op(torch.zeros(3, SHAPE[1])).any()
    assert bool(torch.isfinite(op(torch.full((3, SHAPE[1]), 1e30))).all())


def test_four_bit_codes_are_kept_exactly() -> None:
    """With scales that bfloat16 holds exactly, the 4-bit layout has no weight error at all."""
    weight = stored("Q4_0")
    affine = weight.affine()
    assert affine is not None
    codes, scale, _ = affine
    exact_scale = scale.to(torch.bfloat16).float()

    class Rounded(StoredMatrix):
        def affine(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return codes, exact_scale, -8.0 * exact_scale

        def dequantize(self) -> torch.Tensor:
            shifted = codes.view(*scale.shape, GROUP).float() - 8.0
            return (shifted * exact_scale[..., None]).view(SHAPE)

    rounded = Rounded(weight._weight)
    assert weight_error("int4", rounded) == 0.0
    used = STOCK_LAYOUTS["int4"](rounded)(torch.eye(SHAPE[1])).float().t()
    assert torch.equal(used, rounded.dequantize().to(torch.bfloat16).float())


def test_the_four_bit_layout_is_only_allowed_where_the_operator_takes_it() -> None:
    assert "int4" in allowed("Q4_0", (32, 64))
    assert "int4" not in allowed("Q8_0", (32, 64))
    assert "int4" not in allowed("Q4_0", (24, 64))
    assert "fp32" in allowed("F32", (1, 1))


def test_odd_shapes_of_plain_formats() -> None:
    for shape in ((1, 1), (3, 5), (65, 33), (17, 200)):
        for weight_format in ("F32", "F16", "BF16"):
            weight = stored(weight_format, shape)
            x = random_values(4, shape[1], seed=2)
            expected = x.double() @ weight.dequantize().double().t()
            for name in allowed(weight_format, shape):
                error = float((STOCK_LAYOUTS[name](weight)(x).double() - expected).abs().max())
                assert error < PRODUCT_TOLERANCE[name] * float(expected.abs().max()) + 1e-3, (shape, name)


def test_two_layouts_switch_by_the_number_of_rows() -> None:
    weight = stored("F32")
    few, many = STOCK_LAYOUTS["fp32"](weight), STOCK_LAYOUTS["fp16"](weight)
    both = TwoLayouts(few, many, 4)
    x = random_values(5, SHAPE[1], seed=3)
    assert torch.equal(both(x[:4]), few(x[:4]))
    assert torch.equal(both(x), many(x))
    assert both.num_bytes == few.num_bytes + many.num_bytes


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("two_copies", [False, True])
def test_what_is_planned_is_what_is_resident(weight_format: str, two_copies: bool) -> None:
    backend = CpuBackend("test")
    kinds = [MatrixKind("layer", weight_format, SHAPE), MatrixKind("head", weight_format, SHAPE)]
    backend.prepare(kinds, two_copies=two_copies)
    for kind in kinds:
        op = backend.linear(stored(weight_format), role=kind.role)
        # The packed forms may round up to whole tiles.
        assert op.num_bytes == pytest.approx(backend.resident_bytes(kind), rel=0.05)
        choice = backend.choices[kind]
        assert two_copies or choice.few == choice.many
        assert op(random_values(3, SHAPE[1])).shape == (3, SHAPE[0])
    notes = backend.layout_notes()
    assert len(notes) == len(kinds)
    assert all("largest weight error" in note for note in notes)


def test_the_head_gives_float32_logits() -> None:
    for weight_format in FORMATS:
        op = CpuBackend("test").linear(stored(weight_format), role="head")
        x = random_values(2, SHAPE[1])
        assert op(x).dtype == torch.float32
        expected = x.double() @ stored(weight_format).dequantize().double().t()
        assert float((op(x) - expected).abs().max() / expected.abs().max()) < 1e-3


def test_a_choice_counts_each_layout_once() -> None:
    kind = MatrixKind("layer", "Q4_1", SHAPE)
    assert Choice("int4", "int4", 0, "").resident_bytes(kind) == SHAPE[0] * SHAPE[1] * 5 // 8
    assert Choice("int4", "bf16", 4, "").resident_bytes(kind) == SHAPE[0] * SHAPE[1] * 21 // 8
    assert set(BITS_PER_VALUE) == set(STOCK_LAYOUTS)


def test_few_numbers_of_rows_reach_the_kernels() -> None:
    sizes = {padded_rows(num) for num in range(1, 2049)}
    assert len(sizes) <= 8 + 6 + 6
    assert all(num <= padded_rows(num) < num + 256 for num in range(1, 2049))
    assert [padded_rows(num) for num in (1, 16, 17, 128, 129, 512, 513)] == [16, 16, 32, 128, 192, 512, 768]


@pytest.mark.parametrize("num_rows", [1, 15, 16, 33, 130])
def test_padding_does_not_reach_the_result(num_rows: int) -> None:
    weight = stored("BF16")
    if "bf16" not in allowed("BF16", SHAPE):  # no such products on this processor, and nobody asks for them
        with pytest.raises(RuntimeError, match="bf16"):
            STOCK_LAYOUTS["bf16"](weight)
        return
    x = random_values(num_rows, SHAPE[1])
    out = STOCK_LAYOUTS["bf16"](weight)(x)
    assert out.shape == (num_rows, SHAPE[0])
    expected = x.bfloat16().double() @ weight.dequantize().double().t()
    assert float((out - expected).abs().max() / expected.abs().max()) < 2.0**-7


def test_rows_of_a_weight_for_a_tied_embedding() -> None:
    weight, ids = stored("F32"), torch.tensor([0, 95, 7, 7])
    rows = STOCK_LAYOUTS["fp32"](weight).rows(ids)
    assert rows is not None
    assert torch.equal(rows, weight.dequantize()[ids])


# --- the operators without weights ---


@pytest.mark.parametrize("width", [1, 63, 576, 4096])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_rms_norm(width: int, scale: float) -> None:
    x, weight = random_values(7, width, seed=4, scale=scale), random_values(width, seed=5)
    expected = REFERENCE.rms_norm(x.clone(), weight, 1e-5)
    kept = x.clone()
    torch.testing.assert_close(FAST.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-30)
    assert torch.equal(x, kept), "the input is the residual stream and must stay"


def test_rms_norm_of_heads() -> None:
    x = random_values(5, 6 * 16, seed=6).unflatten(-1, (-1, 16))[:, :4]
    weight = random_values(4, 16, seed=7)
    torch.testing.assert_close(FAST.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("size", [2, 6, 64])
def test_rotate(size: int) -> None:
    x = random_values(5, 6 * size, seed=8).unflatten(-1, (-1, size))[:, :4]
    angles = random_values(5, size // 2, seed=9)
    turn = torch.stack((angles.cos(), angles.sin()), -1)
    torch.testing.assert_close(FAST.rotate(x, turn), REFERENCE.rotate(x, turn))


@pytest.mark.parametrize("width", [1, 63, 1536])
def test_gated_silu(width: int) -> None:
    x = random_values(5, 2 * width, seed=10, scale=3.0)
    expected = REFERENCE.gated_silu(x)
    torch.testing.assert_close(FAST.gated_silu(x.clone()), expected)
    rounded = FAST.gated_silu(x.to(torch.bfloat16)).float()
    torch.testing.assert_close(rounded, expected, rtol=3e-2, atol=1e-2)
