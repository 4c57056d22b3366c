"""The output of one child: read without blocking, cut into lines, the last ones kept.

Used by `children`. Invariant: a line is handed out once and whole; a child that writes without end cannot
keep the reader busy for ever.
"""

from __future__ import annotations

import os
from collections import deque

_KEPT_LINES = 200  # for when the child dies without last words
_MAX_LINE_BYTES = 64 * 1024
_READS_AT_ONCE = 16


class ChildOutput:
    """Reads `fd`, which must not block. The caller closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.has_ended = False
        self.kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""

    def read_lines(self) -> list[str]:
        """The lines that have come since the last call."""
        lines: list[bytes] = []
        for _ in range(_READS_AT_ONCE):
            try:
                chunk = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            if not chunk:
                self.has_ended = True
                break
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            lines += whole
        if self._rest and (self.has_ended or len(self._rest) > _MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        texts = [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        self.kept.extend(texts)
        return texts
