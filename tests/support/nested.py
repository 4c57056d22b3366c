"""Q4_K and Q6_K blocks of given values, which the gguf package reads but cannot write.

Used by tests of formats, operators and loading. Rounds plainly: for tests, not for models.
"""

from __future__ import annotations

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def quantize(values: Floats, weight_format: str) -> Bytes:
    """Blocks [N, row_bytes] of values [N, K]; K is a multiple of 256."""
    make = {"Q4_K": _q4_k, "Q6_K": _q6_k}[weight_format]
    return make(values.reshape(len(values), -1, 256)).reshape(len(values), -1)


def _half(values: Floats) -> tuple[Bytes, Floats]:
    half = np.maximum(values, 1e-7).astype(np.float16)
    return half[..., None].view(np.uint8), half.astype(np.float32)


def _q6_k(x_NBV: Floats) -> Bytes:
    subs = x_NBV.reshape(*x_NBV.shape[:2], 16, 16)
    wanted = np.abs(subs).max(-1) / 31
    scale_bytes, scale = _half(wanted.max(-1) / 127)
    sub_scales = np.round(wanted / scale[..., None]).astype(np.int8)
    each = scale[..., None] * np.maximum(sub_scales, 1)
    codes = np.clip(np.round(subs / each[..., None]), -32, 31).astype(np.int8) + 32
    halves = codes.view(np.uint8).reshape(*x_NBV.shape[:2], 2, 4, 32)
    low, high = halves & 15, halves >> 4
    lower = low[..., :2, :] | low[..., 2:, :] << 4
    upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    flat = x_NBV.shape[:2]
    parts = (lower.reshape(*flat, 128), upper.reshape(*flat, 64), sub_scales.view(np.uint8), scale_bytes)
    return np.concatenate(parts, -1)


def _q4_k(x_NBV: Floats) -> Bytes:
    subs = x_NBV.reshape(*x_NBV.shape[:2], 8, 32)
    low = np.maximum(-subs.min(-1), 0)
    wanted = (subs.max(-1) + low) / 15
    scale_bytes, scale = _half(wanted.max(-1) / 63)
    minimum_bytes, minimum_scale = _half(low.max(-1) / 63)
    sub_scales = np.clip(np.round(wanted / scale[..., None]), 0, 63).astype(np.uint8)
    sub_minima = np.clip(np.round(low / minimum_scale[..., None]), 0, 63).astype(np.uint8)
    each = scale[..., None] * np.maximum(sub_scales, 1)
    raised = subs + (minimum_scale[..., None] * sub_minima)[..., None]
    codes = np.clip(np.round(raised / each[..., None]), 0, 15).astype(np.uint8)
    first = sub_scales[..., :4] | (sub_scales[..., 4:] & 0x30) << 2
    second = sub_minima[..., :4] | (sub_minima[..., 4:] & 0x30) << 2
    third = (sub_scales[..., 4:] & 15) | (sub_minima[..., 4:] & 15) << 4
    pairs = codes.reshape(*x_NBV.shape[:2], 4, 2, 32)
    packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*x_NBV.shape[:2], 128)
    return np.concatenate((scale_bytes, minimum_bytes, first, second, third, packed), -1)
