"""How the pool holds keys and values: as floats of some type, or as 8-bit codes with a scale.

Used by `engine.kv` for sizes, by the models and `reference` for writing and reading; `cpu/native/kv.h` does
the same in our own kernels. An int8 row is one token's key or value of one KV head: its codes, and behind
them the bytes of a float32 scale, largest / 127. Invariant: a row depends on the values that it was made
from alone.

Shapes: D head size, R values of a row in the pool.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import FirstlightError, UnsupportedError

SCALE_BYTES = 4
# What --kv-dtype names; "auto" is what a backend takes by itself.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_LARGEST_CODE = 127.0
_SMALLEST = 1e-30  # rows whose largest value is not above it are zero


def row_values(head_size: int, dtype: torch.dtype) -> int:
    """R: how many numbers of this type a row has."""
    return head_size + (SCALE_BYTES if dtype == torch.int8 else 0)


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
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > _SMALLEST, largest / _LARGEST_CODE, 0.0)
    inverse = torch.where(largest > _SMALLEST, 1.0 / scale, 0.0)
    is_finite = torch.isfinite(values).all(-1, keepdim=True)
    codes = torch.where(is_finite, values * inverse, 0.0).round().to(torch.int8)
    scale = torch.where(is_finite, scale, torch.nan)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), -1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """The values that the pool's rows stand for, in float32 [.., D]."""
    if rows.dtype != torch.int8:
        return rows.float()
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES] * scale
