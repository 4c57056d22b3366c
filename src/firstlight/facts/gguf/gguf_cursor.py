"""A reading position in the header of a GGUF file whose length nobody knows beforehand.

Invariant: nothing is read or allocated past the end of the file or past `MAX_HEADER_BYTES`, whatever length
the file claims.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN

MAX_HEADER_BYTES = 512 * 1024 * 1024
FIRST_READ_BYTES = 2 * 1024 * 1024

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A position in a prefix of the file that grows as the header turns out to be longer."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path
        self.size_bytes = os.fstat(descriptor).st_size
        self.data = bytearray()
        self.position = 0

    def need(self, end: int) -> None:
        """Makes the bytes up to `end` present, or says why that cannot be."""
        if end <= len(self.data):
            return
        if end > self.size_bytes:
            raise ModelFileError(
                f"{self.path} is truncated or damaged: its header reaches past the end of the file "
                f"({self.size_bytes} bytes).",
                DOWNLOAD_AGAIN,
            )
        if end > MAX_HEADER_BYTES:
            raise ModelFileError(
                f"{self.path}: the header is larger than {MAX_HEADER_BYTES} bytes.", DOWNLOAD_AGAIN
            )
        goal = min(self.size_bytes, MAX_HEADER_BYTES, max(end, 2 * len(self.data), FIRST_READ_BYTES))
        while len(self.data) < goal:
            piece = os.pread(self.descriptor, goal - len(self.data), len(self.data))
            if not piece:
                raise ModelFileError(f"{self.path} became shorter while it was read.", DOWNLOAD_AGAIN)
            self.data += piece

    def take(self, layout: struct.Struct) -> Any:
        """The next number, which is then behind us."""
        self.need(self.position + layout.size)
        value = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def string(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """The next string; `what` names it in errors."""
        length = self.take(U64)
        if length > max_bytes:
            raise ModelFileError(f"{self.path}: {what} claims a length of {length} bytes.", DOWNLOAD_AGAIN)
        self.need(self.position + length)
        raw = bytes(self.data[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path}: {what} is not valid UTF-8.", DOWNLOAD_AGAIN) from error

    def skip_strings(self, count: int) -> None:
        """Walks over `count` strings; the hot loop of the header (100 000 tokens and merges)."""
        position, done, unpack = self.position, 0, U64.unpack_from
        while done < count:
            data = self.data
            try:
                while done < count:
                    position += 8 + unpack(data, position)[0]
                    done += 1
            except (struct.error, OverflowError):
                self.need(position + 8)
        self.need(position)
        self.position = position
