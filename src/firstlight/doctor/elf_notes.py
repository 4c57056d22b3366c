"""The build id of an ELF file: which build of a library is loaded, when two bear the same version.

Called by the collector of libraries. Invariant: a file that is no ELF, or has no build id, gives an empty
text and no error.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC, _64_BIT, _LITTLE = b"\x7fELF", 2, 1
_NOTE, _BUILD_ID = 4, 3
_ENTRY = struct.Struct("<IIQQQQQQ")  # type, flags, offset, address, physical, size, size in memory, alignment
_MAX_NOTES_BYTES = 64 * 1024


def build_id(path: Path) -> str:
    """As hexadecimal digits. Raises `OSError` when the file cannot be read."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:4] != _MAGIC or head[4] != _64_BIT or head[5] != _LITTLE:
            return ""
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        if size < _ENTRY.size:
            return ""
        file.seek(table)
        entries = file.read(size * count)
        for index in range(len(entries) // size):
            kind, _, offset, _, _, length, _, _ = _ENTRY.unpack_from(entries, index * size)
            if kind == _NOTE:
                file.seek(offset)
                if found := _in_notes(file.read(min(length, _MAX_NOTES_BYTES))):
                    return found
    return ""


def _in_notes(notes: bytes) -> str:
    place = 0
    while place + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, place)
        start = place + 12 + _padded(name_size)
        if kind == _BUILD_ID and notes[place + 12 : place + 12 + name_size] == b"GNU\0":
            return notes[start : start + size].hex()
        place = start + _padded(size)
    return ""


def _padded(size: int) -> int:
    return (size + 3) // 4 * 4
