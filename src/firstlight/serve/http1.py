"""uvicorn's HTTP/1.1 protocol, within limits: of sizes, of time, and of connections.

Made by uvicorn for each connection, as `serve.process` tells it. The parser below keeps what it has of a
header, however much that is, and copies it with each piece that comes; so bytes are counted before it gets
them. Invariants: what a client may send without being answered is bounded in size and in time; an answer to
what is no request is JSON like every other error, and closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firstlight.base.errors import RequestError
from firstlight.serve.errors import error_bytes, error_headers

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_TARGET_BYTES = 16 * 1024
_SLICE_BYTES = 4096  # of a head that the parser gets at once
HEAD_DEADLINE_S = 30.0  # from the connection, or the first byte of a later request, to the end of the head
BODY_GRACE_S = 30.0  # a body may take this long, and longer by what came of it at the slowest rate
MIN_BODY_BYTES_PER_S = 16 * 1024
_LINGER_S = 1.0  # for a client to read why it was refused, while it may still be sending
_LINGER_BYTES = 1024 * 1024
_OWN_FILES = 64  # what the process has open beside its connections
_TELL_S = 10.0
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Connections:
    """The connections of a server: how many there may be, and which of them wait for a request.

    When there is no room for another one, the one that has waited longest goes, be it idle or half a request.
    """

    def __init__(self, most: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = most if files == resource.RLIM_INFINITY else files - _OWN_FILES
        self.most = max(1, min(most, room))
        self._all: set[Http1Protocol] = set()
        self._waiting: dict[Http1Protocol, None] = {}  # the longest first
        self._untold: dict[str, int] = {}
        self._told_s = -_TELL_S

    def admit(self, one: Http1Protocol) -> None:
        """A new connection, which waits for its first request."""
        self._all.add(one)
        self._waiting[one] = None
        if len(self._all) > self.most:
            longest = next(iter(self._waiting))
            self.forget(longest)
            longest.give_way()

    def waits(self, one: Http1Protocol, *, waits: bool) -> None:
        """Whether it waits for a request, from now on."""
        self._waiting.pop(one, None)
        if waits and one in self._all:
            self._waiting[one] = None

    def forget(self, one: Http1Protocol) -> None:
        """It is over."""
        self._all.discard(one)
        self._waiting.pop(one, None)

    def note(self, error: RequestError) -> None:
        """Say that a connection was refused: the first at once, then all of some seconds in one line."""
        code = error.code or ""
        self._untold[code] = self._untold.get(code, 0) + 1
        if monotonic() - self._told_s >= _TELL_S:
            counted = ", ".join(f"{number} times {name}" for name, number in sorted(self._untold.items()))
            log.warning("connections refused: %s; the last: %s", counted, error)
            self._untold.clear()
            self._told_s = monotonic()


class Http1Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, peers: Connections, **rest: Any) -> None:
        super().__init__(**rest)
        self._peers = peers
        self._timer: asyncio.TimerHandle | None = None
        self._timer_began_s = 0.0
        self._in_head = True
        self._num_headers = 0
        self._unused_bytes = 0  # since the parser last made something of them
        self._body_bytes = 0
        self._complaint: RequestError | None = None
        self._is_refused = False
        self._discarded_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._arm()
        self._peers.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._disarm()
        self._peers.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop. A head goes to the parser in small slices, a body as it comes."""
        self._unset_keepalive_if_required()
        position = 0
        while position < len(data) and not self._is_refused:
            if self._timer is None:
                self._arm()
            end = position + _SLICE_BYTES if self._in_head else len(data)
            self._feed(data[position:end])
            position = end
        if self._is_refused:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _LINGER_BYTES:
                self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._in_head, self._num_headers, self._unused_bytes = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called by the parser, perhaps more than once."""
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._complain(
                f"The target of the request is longer than {MAX_TARGET_BYTES} bytes; send less in it.",
                "target_too_long",
                414,
            )
        else:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser. What comes behind a body is no header."""
        if not self._in_head:
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._complain(
                f"The request has more than {MAX_HEADERS} headers; send fewer.", "too_many_headers", 431
            )
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser: the request goes to the application."""
        self._unused_bytes = 0
        if self._complaint is not None:
            return
        super().on_headers_complete()
        self._in_head, self._body_bytes = False, 0
        self._peers.waits(self, waits=False)
        self._arm()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._unused_bytes = 0
        self._body_bytes += len(body)
        if self._complaint is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head, self._unused_bytes = True, 0
        self._disarm()
        if self._complaint is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn: the next request may come."""
        super().on_response_complete()
        if not self.pipeline:
            self._peers.waits(self, waits=True)

    def give_way(self) -> None:
        """Others need the place of this one, which waits for a request."""
        if self._timer is None:  # it has been answered, and nothing has come since
            self.transport.close()
            return
        text = f"The server has {self._peers.most} connections, which is all it takes (--max-connections)."
        self._refuse(
            RequestError(
                f"{text} Try again a little later.",
                code="too_many_connections",
                status=503,
                kind="server_error",
                retry_after_s=1.0,
            )
        )

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn's advice to install a library for what we do not speak; the request is served as it is."""

    def _feed(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to what we do not speak: the request is served as it is
        except httptools.HttpParserError:
            self._complain("Invalid HTTP request received. Send HTTP/1.1.", "invalid_http", 400)
        if self._unused_bytes > MAX_HEAD_BYTES:
            self._complain(
                f"The headers of the request are longer than {MAX_HEAD_BYTES} bytes; send less in them.",
                "headers_too_large",
                431,
            )
        if self._complaint is not None:
            self._refuse(self._complaint)

    def _complain(self, text: str, code: str, status: int) -> None:
        if self._complaint is None:
            self._complaint = RequestError(text, code=code, status=status)

    def _arm(self) -> None:
        """The time for a head or a body begins."""
        self._disarm()
        self._timer_began_s = monotonic()
        self._timer = self.loop.call_later(HEAD_DEADLINE_S if self._in_head else BODY_GRACE_S, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """The time is over, unless it is ours: we do not read, or a body comes at a fair rate."""
        took_s = monotonic() - self._timer_began_s
        fair_s = BODY_GRACE_S + self._body_bytes / MIN_BODY_BYTES_PER_S
        if self.flow.read_paused:
            self._arm()
        elif not self._in_head and took_s < fair_s:
            self._timer = self.loop.call_later(fair_s - took_s, self._look)
        else:
            part = "head" if self._in_head else "body"
            self._complain(
                f"The {part} of the request did not come within {took_s:.3g} s; send it faster.",
                "request_too_slow",
                408,
            )
            assert self._complaint is not None
            self._refuse(self._complaint)

    def _refuse(self, error: RequestError) -> None:
        """Say why, and close; behind answers that are still under way, only close."""
        self._is_refused = True
        self._disarm()
        self._peers.waits(self, waits=False)
        self._peers.note(error)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self._in_head:
            self.cycle.keep_alive = False
            return
        if is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not (is_answering and self.cycle.response_started):
            self.transport.write(_whole(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)


def _whole(error: RequestError) -> bytes:
    """An answer with its head."""
    body = error_bytes(error)
    rows = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error_headers(error),
        "connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    return f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\n{head}\r\n".encode() + body
