r"""The output of a child: drained by a thread, cut into lines, written to its log, the last lines kept.

A line ends at `\n` or, as progress bars are drawn, at `\r`; what stands for a second without an end is handed
on as it is, because the line that explains a hang often has none. Invariant: the child never waits for us,
whatever becomes of the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

_KEPT_LINES = 400  # for when the child dies without last words
_MAX_LINE_BYTES = 64 * 1024
_MAX_LOG_BYTES = 64 * 1024 * 1024  # then the log starts again, and one older one is kept
_PARTIAL_S = 1.0
_END = re.compile(rb"\r\n|\n|\r")


class OutputLine(msgspec.Struct, frozen=True):
    """One line, without its end. `is_partial`: its end had not come when it was handed on."""

    time_s: float
    text: str
    is_partial: bool = False


class LineCutter:
    """Bytes in, lines out."""

    def __init__(self) -> None:
        self._rest = b""
        self._rest_since_s = 0.0

    def feed(self, data: bytes, now_s: float) -> list[OutputLine]:
        """The lines that end in `data`."""
        if not self._rest:
            self._rest_since_s = now_s
        # A "\r" at the very end may be the first half of "\r\n": it ends its line with the next bytes.
        held = b"\r" if data.endswith(b"\r") else b""
        *whole, rest = _END.split(self._rest + data[: len(data) - len(held)])
        self._rest = rest + held
        if whole:
            self._rest_since_s = now_s
        while len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return [OutputLine(now_s, _text(line)) for line in whole if line]

    def take_partial(self, now_s: float) -> list[OutputLine]:
        """What has stood without an end for a second; the rest of it comes as a line of its own."""
        if not self._rest or now_s - self._rest_since_s < _PARTIAL_S:
            return []
        return self.finish(now_s)

    def finish(self, now_s: float) -> list[OutputLine]:
        """What is left."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [OutputLine(now_s, _text(rest), is_partial=True)] if rest else []


class ChildOutput:
    """Drains `fd` into `log_path` and `on_line`, which is called in this thread. The caller closes `fd`."""

    def __init__(self, fd: int, log_path: Path, on_line: Callable[[OutputLine], None]) -> None:
        self._fd = fd
        self._log_path = log_path
        self._on_line = on_line
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = self._open_log()
        self._thread = threading.Thread(target=self._drain, name=f"output of {log_path.stem}", daemon=True)
        self._thread.start()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that came."""
        return tuple(self._kept)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the output; a grandchild may keep it open for ever."""
        self._thread.join(timeout_s)

    def _drain(self) -> None:
        cutter = LineCutter()
        while True:
            is_readable, _, _ = select.select([self._fd], [], [], _PARTIAL_S / 2)
            lines: list[OutputLine] = []
            if is_readable:
                data = self._read()
                if data is None:
                    break
                self._write_log(data)
                lines = cutter.feed(data, time.monotonic())
            self._hand_on([*lines, *cutter.take_partial(time.monotonic())])
        self._hand_on(cutter.finish(time.monotonic()))
        os.close(self._log)

    def _read(self) -> bytes | None:
        """What is there; None at the end."""
        try:
            return os.read(self._fd, 65536) or None
        except BlockingIOError:
            return b""
        except OSError:  # the other end of a pseudo-terminal is closed
            return None

    def _hand_on(self, lines: list[OutputLine]) -> None:
        for line in lines:
            self._kept.append(line.text)
            self._on_line(line)

    def _write_log(self, data: bytes) -> None:
        # A full disk must not stop the child: its output is lost then, and nothing else.
        with contextlib.suppress(OSError):
            if os.fstat(self._log).st_size > _MAX_LOG_BYTES:
                os.close(self._log)
                os.replace(self._log_path, self._log_path.with_suffix(".log.1"))
                self._log = self._open_log()
            os.write(self._log, data)

    def _open_log(self) -> int:
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
