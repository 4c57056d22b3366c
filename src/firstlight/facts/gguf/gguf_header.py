"""The header of a GGUF file (versions 2 and 3): metadata and tensor positions, read in milliseconds.

Long arrays are only walked, and decoded when asked for. Every length in the file is untrusted. Invariant:
nothing is allocated on the word of the file alone, so a hostile header costs at most `MAX_HEADER_BYTES` of
memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.remedies import CHECK_FILE, DOWNLOAD_AGAIN, GIVE_MODEL
from firstlight.facts.gguf.gguf_cursor import U32, U64, Cursor

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
MAX_KEY_BYTES = 65535
MAX_METADATA = 100_000
MAX_TENSORS = 4_000_000
MAX_DIMENSIONS = 4
MAX_VALUES = 1 << 48
MAX_ALIGNMENT = 1 << 24

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in SCALARS.items()}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` in row-major order (GGUF stores it reversed), `offset` from the start of the
    file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header. `data_offset` is where tensor data begins; `size_bytes` is the size of the file."""

    path: str
    version: int
    metadata: Mapping[str, Any]
    tensors: dict[str, GgufTensor]
    data_offset: int
    size_bytes: int

    @property
    def architecture(self) -> str:
        """The value of general.architecture; a `ModelFileError` if there is none."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelFileError(
                f"{self.path}: the metadata general.architecture is missing or not a string.",
                DOWNLOAD_AGAIN,
            )
        return value


@dataclass(frozen=True)
class _ArrayRange:
    """An array that was walked and not decoded: `count` items of `kind` from `start` in the header bytes."""

    kind: int
    count: int
    start: int


class _Metadata(Mapping[str, Any]):
    """Metadata by key. Arrays become a list of str, or a numpy array, when first asked for."""

    def __init__(self, path: str, data: bytearray, values: dict[str, Any]) -> None:
        self._path = path
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _ArrayRange):
            value = self._values[key] = self._decode(key, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _decode(self, key: str, array: _ArrayRange) -> list[str] | np.ndarray[Any, Any]:
        if array.kind != STRING:
            import numpy as np  # a fifth of a second, and most readers want no such array

            dtype = np.dtype("<" + SCALARS[array.kind])
            return np.frombuffer(self._data, dtype, array.count, array.start).copy()
        data, position, strings = bytes(self._data), array.start, []
        unpack, start_of_text = U64.unpack_from, U64.size
        try:
            for _ in range(array.count):
                begin = position + start_of_text
                position = begin + unpack(data, position)[0]
                strings.append(data[begin:position].decode())
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"{self._path}: entry {len(strings)} of the metadata {key} is not valid UTF-8.",
                DOWNLOAD_AGAIN,
            ) from error
        return strings


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the header of a GGUF file.

    Raises `ModelFileError` for what is not GGUF, truncated or inconsistent, `UnsupportedError` for versions
    and byte orders that this reader does not know.
    """
    path = str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", CHECK_FILE) from error
    try:
        return _parse(Cursor(descriptor, path))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", CHECK_FILE) from error
    finally:
        os.close(descriptor)


def _parse(cursor: Cursor) -> GgufFile:
    version = _version(cursor)
    num_tensors, num_metadata = cursor.take(U64), cursor.take(U64)
    if num_tensors > MAX_TENSORS or num_metadata > MAX_METADATA:
        raise ModelFileError(
            f"{cursor.path}: the header claims {num_tensors} tensors and {num_metadata} metadata entries; "
            "it is damaged.",
            DOWNLOAD_AGAIN,
        )
    values: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in values:
            raise ModelFileError(f"{cursor.path}: the metadata {key} appears twice.", DOWNLOAD_AGAIN)
        values[key] = _value(cursor, key)
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(
            f"{cursor.path}: general.alignment is {alignment!r}, not a power of two.", DOWNLOAD_AGAIN
        )
    data_offset = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in infos:
        if name in tensors:
            raise ModelFileError(f"{cursor.path}: the tensor {name} appears twice.", DOWNLOAD_AGAIN)
        if offset % alignment:
            raise ModelFileError(
                f"{cursor.path}: the tensor {name} is not aligned to {alignment} bytes.", DOWNLOAD_AGAIN
            )
        tensors[name] = GgufTensor(name, shape, type_id, data_offset + offset)
    metadata = _Metadata(cursor.path, cursor.data, values)
    return GgufFile(cursor.path, version, metadata, tensors, data_offset, cursor.size_bytes)


def _version(cursor: Cursor) -> int:
    cursor.need(8)
    if bytes(cursor.data[:4]) != MAGIC:
        raise ModelFileError(f"{cursor.path} is not a GGUF file: it does not begin with 'GGUF'.", GIVE_MODEL)
    cursor.position = 4
    version = int(cursor.take(U32))
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.path} is a big-endian GGUF file.", "Use the little-endian file of the same model."
        )
    if version not in (2, 3):
        raise UnsupportedError(
            f"{cursor.path} has GGUF version {version}; versions 2 and 3 are supported.",
            "Convert the model again with a current llama.cpp.",
        )
    return version


def _value(cursor: Cursor, key: str) -> Any:
    kind = cursor.take(U32)
    if kind == STRING:
        return cursor.string(f"the metadata {key}")
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in SCALARS:
        raise ModelFileError(
            f"{cursor.path}: the metadata {key} has the unknown type {kind}.", DOWNLOAD_AGAIN
        )
    return cursor.take(_SCALAR_STRUCTS[kind])


def _array(cursor: Cursor, key: str) -> _ArrayRange:
    kind, count = cursor.take(U32), cursor.take(U64)
    if kind != STRING and kind not in SCALARS:
        raise ModelFileError(
            f"{cursor.path}: the metadata {key} is an array of the unknown type {kind}.", DOWNLOAD_AGAIN
        )
    item_bytes = 8 if kind == STRING else _SCALAR_STRUCTS[kind].size  # of a string: at least its length
    if count * item_bytes > cursor.size_bytes - cursor.position:
        raise ModelFileError(
            f"{cursor.path} is truncated or damaged: the metadata {key} claims {count} entries, more "
            f"than the file of {cursor.size_bytes} bytes can hold.",
            DOWNLOAD_AGAIN,
        )
    start = cursor.position
    if kind == STRING:
        cursor.skip_strings(count)
    else:
        cursor.need(start + count * item_bytes)
        cursor.position = start + count * item_bytes
    return _ArrayRange(kind, count, start)


def _tensor_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name", MAX_KEY_BYTES)
    num_dimensions = cursor.take(U32)
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelFileError(
            f"{cursor.path}: the tensor {name} claims {num_dimensions} dimensions.", DOWNLOAD_AGAIN
        )
    dimensions = [cursor.take(U64) for _ in range(num_dimensions)]
    num_values = 1
    for size in dimensions:
        num_values *= size
        if not 1 <= size <= MAX_VALUES or num_values > MAX_VALUES:
            raise ModelFileError(
                f"{cursor.path}: the tensor {name} claims the shape {dimensions}.", DOWNLOAD_AGAIN
            )
    type_id, offset = cursor.take(U32), cursor.take(U64)
    if offset > cursor.size_bytes:
        raise ModelFileError(
            f"{cursor.path} is truncated: the tensor {name} begins at byte {offset} of the data, past "
            f"the end of the file ({cursor.size_bytes} bytes).",
            DOWNLOAD_AGAIN,
        )
    return name, tuple(reversed(dimensions)), type_id, offset
