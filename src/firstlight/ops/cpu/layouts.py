"""The resident forms of a weight for stock CPU operators, and what each of them rounds.

A layout takes the exact values (or the exact 4-bit codes) of a matrix and keeps only its own form. What it
rounds is stated in its docstring and measured by `weight_error`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from firstlight.base.errors import UnsupportedError
from firstlight.ops.matrix import Matrix

GROUP = 32
# aten's 4-bit product wants whole vectors of outputs.
INT4_OUTPUT_MULTIPLE = 16
# oneDNN chooses the blocking of a packed weight for a number of rows; the time hardly depends on it.
PACKED_FOR_ROWS = 128


class Int4Linear:
    """4-bit codes in groups of 32 with bfloat16 scale and zero; fastest for a few rows.

    Rounds: scales and offsets to bfloat16 (the operator's fast path takes nothing else), inputs and outputs
    to bfloat16. Codes are kept exactly.
    """

    layout = "int4 groups of 32, bf16 scales"

    def __init__(self, weight: Matrix) -> None:
        affine = weight.affine()
        assert affine is not None, "the int4 layout needs 4-bit blocks"
        codes_OI, scale_OG, offset_OG = affine
        self._order = weight.order
        # aten computes (code - 8) * scale + zero.
        zero_OG = offset_OG + 8.0 * scale_OG
        scales_and_zeros = torch.stack((scale_OG, zero_OG), -1).transpose(0, 1).contiguous()
        self._scales = scales_and_zeros.to(torch.bfloat16)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI.to(torch.int32), 1)
        self.num_bytes = self._packed.numel() * self._packed.element_size() + self._scales.numel() * 2

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._order is not None:
            x_TI = x_TI[:, self._order]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TI.to(torch.bfloat16), self._packed, GROUP, self._scales
        )

    def rows(self, indices_T: torch.Tensor) -> None:
        return None


class HalfLinear:
    """float16 weights, float32 inputs, sums and outputs (fbgemm); fast for few rows, and nearly exact."""

    layout = "fp16 packed, fp32 activations"

    def __init__(self, weight: Matrix) -> None:
        dense = weight.dequantize()
        if float(dense.abs().max()) > torch.finfo(torch.float16).max:
            raise UnsupportedError(
                "a weight is larger than float16 can hold (65504)", "Serve this model with --dtype float32."
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(dense, None)
        self.num_bytes = dense.numel() * 2

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x_TI.float(), self._packed)

    def rows(self, indices_T: torch.Tensor) -> None:
        return None


class BfloatLinear:
    """bfloat16 weights in oneDNN's blocked form, bfloat16 inputs and outputs; fastest for many rows.

    Packed once: `F.linear` on a plain matrix reorders it in every call, at 32 rows a third of its time. The
    rows are padded to a few sizes: oneDNN compiles a kernel for each number of rows (4 to 12 ms) and keeps
    it, which for all numbers up to 512 would be 1.2 GB.
    """

    layout = "bf16 packed"

    def __init__(self, weight: Matrix) -> None:
        dense = weight.dequantize().to(torch.bfloat16)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, PACKED_FOR_ROWS)
        self.num_bytes = dense.numel() * 2

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        num_rows = x_TI.shape[0]
        padded = x_TI.new_empty((padded_rows(num_rows), x_TI.shape[1]), dtype=torch.bfloat16)
        padded[:num_rows] = x_TI  # the other rows are never read
        # The last three arguments: no operation is fused behind the product.
        out = torch.ops.mkldnn._linear_pointwise(padded, self._packed, None, "none", [], "")
        return out[:num_rows]

    def rows(self, indices_T: torch.Tensor) -> None:
        return None


class FloatLinear:
    """float32 weights; where nothing faster exists on this machine."""

    layout = "fp32"

    def __init__(self, weight: Matrix) -> None:
        self.weight_OI = weight.dequantize()
        self.num_bytes = self.weight_OI.numel() * 4

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI.float(), self.weight_OI)

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor:
        return self.weight_OI.index_select(0, indices_T)


Layout = Int4Linear | HalfLinear | BfloatLinear | FloatLinear
STOCK_LAYOUTS: dict[str, Callable[[Matrix], Layout]] = {
    "int4": Int4Linear,
    "fp16": HalfLinear,
    "bf16": BfloatLinear,
    "fp32": FloatLinear,
}

# int4: the code, and a bfloat16 scale and zero for each group of 32.
BITS_PER_VALUE = {"int4": 5.0, "fp16": 16.0, "bf16": 16.0, "fp32": 32.0}


class TwoLayouts:
    """One layout up to `max_few_rows` rows, another above; both are resident."""

    def __init__(self, few: Layout, many: Layout, max_few_rows: int) -> None:
        self._few, self._many, self._max_few_rows = few, many, max_few_rows
        self.layout = f"{few.layout} up to {max_few_rows} rows, {many.layout} above"
        self.num_bytes = few.num_bytes + many.num_bytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        layout = self._few if x_TI.shape[0] <= self._max_few_rows else self._many
        return layout(x_TI)

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor | None:
        return self._many.rows(indices_T)


def allowed(weight_format: str, shape: tuple[int, ...]) -> list[str]:
    """Layouts that can hold a matrix of this format and shape [O, I] on this machine."""
    names = ["fp32"]
    if "fbgemm" in torch.backends.quantized.supported_engines:
        names.append("fp16")
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        names.append("bf16")
    four_bit = weight_format in ("Q4_0", "Q4_1", "INT4", "INT4_ZERO")
    if four_bit and shape[0] % INT4_OUTPUT_MULTIPLE == 0 and shape[1] % GROUP == 0:
        names.append("int4")
    return names


def padded_rows(num_rows: int) -> int:
    """The next number of rows for which a kernel is kept: steps of 16, from 128 on 64, from 512 on 256."""
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 256
    return -(-num_rows // step) * step


def weight_error(name: str, weight: Matrix) -> float:
    """The largest deviation of a layout's weights from the checkpoint's, as a share of the largest weight."""
    dense = weight.dequantize()
    if name == "int4":
        affine = weight.affine()
        assert affine is not None, "the int4 layout needs 4-bit blocks"
        codes, scale, offset = affine
        shifted = codes.view(*scale.shape, GROUP).float() - 8.0
        zero = (offset + 8.0 * scale).to(torch.bfloat16).float()
        kept = shifted * scale.to(torch.bfloat16).float()[..., None] + zero[..., None]
        kept = kept.view(dense.shape)
        dense = dense if weight.order is None else dense[:, weight.order]
    else:
        kept = dense.to({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]).float()
    return float((kept - dense).abs().max() / dense.abs().max().clamp_min(1e-30))
