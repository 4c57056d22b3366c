"""The header of a safetensors file: names, types, shapes and byte ranges, checked before anything is read.

Invariant: the ranges handed out lie inside the file, do not overlap, leave no hole, and have the size that
type and shape demand.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.fields import lfs_pointer
from firstlight.facts.checkpoint.remedies import CHECK_FILE, DOWNLOAD_AGAIN

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of the file; `offset` is from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(path: str | Path) -> dict[str, SafetensorsEntry]:
    """The tensors of one file by name. Raises `ModelFileError` for a missing, truncated or damaged file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(8), size_bytes)
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", CHECK_FILE) from error
    if len(raw) < length:
        raise ModelFileError(f"{path} became shorter while it was read.", DOWNLOAD_AGAIN)
    try:
        header = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header is damaged: {error}", DOWNLOAD_AGAIN) from error
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = [_entry(path, name, value, data_start) for name, value in header.items()]
    _require_dense(path, entries, data_start, size_bytes)
    return {entry.name: entry for entry in entries}


def _header_length(path: Path, first: bytes, size_bytes: int) -> int:
    if first.startswith(b"version "):
        raise lfs_pointer(path)
    if len(first) < 8:
        raise ModelFileError(f"{path} is truncated: it has only {size_bytes} bytes.", DOWNLOAD_AGAIN)
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES:
        raise ModelFileError(
            f"{path} is not a safetensors file: it claims a header of {length} bytes.", DOWNLOAD_AGAIN
        )
    if 8 + length > size_bytes:
        raise ModelFileError(
            f"{path} is truncated: the header ends at byte {8 + length}, the file at {size_bytes}.",
            DOWNLOAD_AGAIN,
        )
    return int(length)


def _entry(path: Path, name: str, value: Any, data_start: int) -> SafetensorsEntry:
    fields = value if isinstance(value, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ModelFileError(f"{path}: the header entry of {name[:200]} is damaged.", DOWNLOAD_AGAIN)
    if dtype not in DTYPE_BITS:
        raise ModelFileError(
            f"{path}: the tensor {name[:200]} has the unknown type {dtype[:40]!r}.", DOWNLOAD_AGAIN
        )
    begin, end = offsets
    needed_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != needed_bytes:
        raise ModelFileError(
            f"{path}: the tensor {name[:200]} needs {needed_bytes} bytes for {dtype} {shape}, "
            f"the header gives it {end - begin}.",
            DOWNLOAD_AGAIN,
        )
    return SafetensorsEntry(name, dtype, tuple(shape), data_start + begin, needed_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _require_dense(path: Path, entries: list[SafetensorsEntry], data_start: int, size_bytes: int) -> None:
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise ModelFileError(
                f"{path}: the bytes of {entry.name[:200]} begin at {entry.offset}, expected {position}; "
                "tensors overlap or leave a hole.",
                DOWNLOAD_AGAIN,
            )
        position += entry.nbytes
    if position > size_bytes:
        raise ModelFileError(
            f"{path} is truncated: its tensors need {position} bytes, the file has {size_bytes}.",
            DOWNLOAD_AGAIN,
        )
    if position < size_bytes:
        raise ModelFileError(
            f"{path} is damaged: {size_bytes - position} bytes follow the last tensor.", DOWNLOAD_AGAIN
        )
