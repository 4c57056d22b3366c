"""How the pool holds keys and values: as floats of some type, or as 8-bit codes with a scale.

`cpu/native/kv.h` does the same in our own kernels. An int8 row is one token's key or value of one KV head:
its codes, and behind them the bytes of a float32 scale, of the largest one's code in 16 bits, and of its
place, where the codes have a 0: a few coordinates of a key are far larger than the others, and would coarsen
the scale. Invariant: a row depends on the values that it was made from alone.

Shapes: D head size, R values of a row in the pool.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import FirstlightError, UnsupportedError
from firstlight.facts.planning.memory_budget import INT8_TAIL_BYTES as TAIL_BYTES

# What --kv-dtype names; "auto" is what a backend takes by itself.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_MOST_8, _MOST_16 = 127.0, 32000.0
_SMALLEST = 1e-30  # rows whose largest value is not above it are zero


def row_values(head_size: int, dtype: torch.dtype) -> int:
    """R: how many numbers of this type a row has."""
    return head_size + (TAIL_BYTES if dtype == torch.int8 else 0)


def row_bytes(head_size: int, dtype: torch.dtype) -> int:
    """Of one token's key, or value, of one KV head."""
    return row_values(head_size, dtype) * dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    """As --kv-dtype and the start-up report write it."""
    return str(dtype).removeprefix("torch.")


def chosen(wanted: str, automatic: torch.dtype) -> torch.dtype:
    """What a backend that can hold every type uses for a --kv-dtype of `wanted`."""
    if wanted != "auto" and wanted not in DTYPES:
        raise UnsupportedError(f"--kv-dtype {wanted} is not supported", f"Use auto, {', '.join(DTYPES)}.")
    return DTYPES.get(wanted, automatic)


def refused(wanted: str, where: str, remedy: str) -> FirstlightError:
    """For a backend that cannot hold KV as `wanted`; `where` says what it does instead."""
    return UnsupportedError(f"--kv-dtype {wanted} is not supported here: {where}", remedy)


def pack(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [.., D] as the pool holds them, [.., R]. Infinity or NaN make a whole int8 row NaN."""
    if dtype != torch.int8:
        return values.to(dtype)
    values = values.float()
    is_finite = torch.isfinite(values).all(-1, keepdim=True)
    sizes = torch.where(is_finite, values, 0.0).abs()
    place = sizes.argmax(-1, keepdim=True)
    first, second = sizes.gather(-1, place), sizes.scatter(-1, place, 0.0).amax(-1, keepdim=True)
    scale = torch.maximum(second / _MOST_8, first / _MOST_16)
    inverse = torch.where(first > _SMALLEST, 1.0 / scale, 0.0)
    codes = torch.where(is_finite, values * inverse, 0.0).round()
    scale = torch.where(is_finite, torch.where(first > _SMALLEST, scale, 0.0), torch.nan)
    parts = (scale, codes.gather(-1, place).to(torch.int16), place.to(torch.int16))
    tail = [part.contiguous().view(torch.int8) for part in parts]
    return torch.cat((codes.scatter(-1, place, 0.0).to(torch.int8), *tail), -1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """The values that the pool's rows stand for, in float32 [.., D]."""
    if rows.dtype != torch.int8:
        return rows.float()
    codes, tail = rows[..., :-TAIL_BYTES], rows[..., -TAIL_BYTES:].contiguous()
    scale, outlier = tail.view(torch.float32)[..., :1], tail.view(torch.int16)[..., 2:3]
    place = tail.view(torch.int16)[..., 3:].long()
    place = place.where((place >= 0) & (place < codes.shape[-1]), 0)  # of a slot that was never written
    return (codes * scale).scatter(-1, place, outlier * scale)
