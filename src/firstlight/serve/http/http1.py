"""uvicorn's HTTP/1.1 protocol for strangers: within limits of size, time and number, and errors in our shape.

Chosen by `serve.process`; `HttpServer` gives each connection its `Guard`. Invariants: the parser never holds
more than a head's limit; a connection always has a deadline unless a request of its is being answered; what
is refused here is answered as every other error, and closes the connection.
"""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firstlight.base import client_limits
from firstlight.base.client_limits import Refusal
from firstlight.serve.http import connections
from firstlight.serve.http.connections import BUSY, Guard, answer_of

_SPREAD = 0.1
MAX_PIPELINED = 32  # requests on one connection that wait for their turn
BETWEEN, HEAD, BODY = "between requests", "head", "body"  # what the next byte belongs to
_OF_UPGRADE = frozenset({b"upgrade", b"http2-settings", b"connection"})


class _Refused(Exception):
    """Stops the parser."""


class Http1Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, peers: Guard | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = peers or Guard()
        self._new_parser()
        self._stage = BETWEEN
        self._is_deaf = False  # nothing more is read from it
        self._refusal: Refusal | None = None  # found while the parser runs
        self._num_headers = 0
        self._num_unspent = 0  # bytes since the last that had an end: a head, a piece of a body
        self._num_discarded = 0
        self._num_body_bytes = 0
        self._head_s = 0.0  # when the last head was complete
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_of = BETWEEN
        self._reading: asyncio.TimerHandle | None = None  # until when it must have read something
        self.num_held_bytes = 0  # of bodies whose requests have not been answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        if self._guard.seats.take(self):
            self._set_deadline()
        else:
            self._refuse(client_limits.NO_SEAT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._is_deaf = True
        self._guard.seats.leave(self)
        self._release()
        self._unset_deadline()
        self._unset_keepalive_if_required()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Somebody else needs the seat, and this one has not asked anything."""
        if self._stage == BETWEEN and self.timeout_keep_alive_task is not None:
            self._is_deaf = True
            self.transport.close()  # it has been answered, and nothing has come since
        else:
            self._refuse(client_limits.NO_SEAT)
        self._must_read()

    def pause_writing(self) -> None:
        """Called by the transport: much waits for a client that does not read."""
        super().pause_writing()
        self._must_read()

    def resume_writing(self) -> None:
        """Called by the transport: the client has read."""
        if self._reading is not None and not self.transport.is_closing():
            self._reading.cancel()
            self._reading = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Called for a connection that is idle; what it has not read does not keep it."""
        super().timeout_keep_alive_handler()
        self._must_read()

    def _must_read(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._guard.body_timeout_s, self.transport.abort)

    # --- what comes in ---

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with at most a few hundred kilobytes."""
        self._unset_keepalive_if_required()
        while data and not self._is_deaf:
            room = client_limits.MAX_HEAD_BYTES - self._num_unspent
            if room <= 0:
                self._refuse(client_limits.HEAD_TOO_LARGE)
                return
            data = self._feed(data[:room]) + data[room:]
        if self._is_deaf:
            self._discard(len(data))
        else:
            self._set_deadline()

    def _feed(self, piece: bytes) -> bytes:
        """Parses `piece`; what is to be parsed again."""
        self._num_unspent += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal or client_limits.NO_HTTP)
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The request that wanted to speak another protocol, as one that does not: a server may ignore it.

        Java's client asks so for HTTP/2, with the body behind it.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(client_limits.NO_TUNNEL)
            return b""
        kept = [(name, value) for name, value in self.headers if name not in _OF_UPGRADE]
        lines = [b"%s %s HTTP/1.1" % (method, self.url), *(b"%s: %s" % header for header in kept)]
        self._new_parser()
        self._stage, self._num_unspent = BETWEEN, 0
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn has it: a pipelined request after the last one is no fault of the first.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > client_limits.LINGER_BYTES:
            self.transport.abort()

    # --- what the parser finds ---

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._stage, self._num_headers = HEAD, 0

    def on_url(self, url: bytes) -> None:
        """Called by the parser with a piece of the target."""
        if len(self.url) + len(url) > client_limits.MAX_TARGET_BYTES:
            self._stop(client_limits.TARGET_TOO_LONG)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser; also for what follows a body, which nobody reads."""
        self._num_headers += 1
        if self._num_headers > client_limits.MAX_HEADERS:
            self._stop(client_limits.TOO_MANY_HEADERS)
        if self._stage == HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self.parser.should_upgrade():
            return  # see `_without_upgrade`
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._stop(client_limits.NO_HOST)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(client_limits.NO_HTTP)
        self._stage, self._num_unspent = BODY, 0
        self._head_s, self._num_body_bytes = monotonic(), 0
        self._unset_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a piece of the body."""
        self._num_unspent = 0
        self._num_body_bytes += len(body)
        if self._is_deaf:
            return
        super().on_body(body)
        if not self.cycle.response_complete:
            self.num_held_bytes += len(body)
            victim = self._guard.hold(self, len(body))
            if isinstance(victim, Http1Protocol):
                victim._refuse(BUSY)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.parser.should_upgrade():
            return
        self._stage, self._num_unspent = BETWEEN, 0
        self._unset_deadline()
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._guard.seats.works(self)

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Refused

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._must_read()
        elif not self.pipeline and self._stage != BETWEEN:
            self._unset_keepalive_if_required()  # the deadline of what it sends is nearer
        if not self.pipeline:
            self._release()
            self._guard.seats.waits(self)
        self._set_deadline()

    def _set_deadline(self) -> None:
        """A head or a body that is awaited has a deadline, which begins with the waiting."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        awaited = HEAD
        if self._stage == BODY and not self.pipeline:
            awaited = BODY
        elif is_busy or (self._stage == BETWEEN and self.timeout_keep_alive_task is not None):
            awaited = BETWEEN
        if self._is_deaf or self.transport.is_closing():
            awaited = BETWEEN
        if awaited == self._deadline_of:
            return
        self._unset_deadline()
        if awaited != BETWEEN:
            seconds = self._guard.header_timeout_s if awaited == HEAD else self._guard.body_timeout_s
            # A little more for some: a thousand that came at once are not to be answered at once.
            seconds *= 1 + _SPREAD * random.random()
            self._deadline = self.loop.call_later(seconds, self._too_late, awaited)
            self._deadline_of = awaited

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._deadline_of = None, BETWEEN

    def _too_late(self, awaited: str) -> None:
        if awaited == HEAD:
            self._refuse(client_limits.head_too_late(self._guard.header_timeout_s, " (--header-timeout)"))
            return
        is_wanted = not self.cycle.response_complete
        fair_s = self._num_body_bytes / connections.MIN_BODY_BYTES_PER_S if is_wanted else 0.0
        took_s = monotonic() - self._head_s
        left_s = self._guard.body_timeout_s + fair_s - took_s
        if left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._too_late, awaited)
        else:
            self._refuse(client_limits.body_too_late(round(took_s, 1), " (--body-timeout)"))

    def _refuse(self, refusal: Refusal) -> None:
        """Reads nothing more. Whose own request is at fault is told so; who was asking before is served."""
        self._is_deaf = True
        self._unset_deadline()
        self._guard.refused(refusal)
        cycle, is_own = self.cycle, self._stage == BODY
        is_busy = cycle is not None and not cycle.response_complete
        if is_busy and not is_own:
            cycle.keep_alive = False  # the answer that is on its way is the last
            return
        if is_busy and (self.pipeline or cycle.response_started):
            self.transport.abort()  # another answer is in the middle of being sent
            return
        if is_busy:
            cycle.scope["state"]["refused"] = refusal.status
            cycle.disconnected = True
            cycle.message_event.set()
        if is_busy or not is_own:  # else it has its answer, and its body is too much
            self.transport.write(answer_of(refusal))
        self._release()
        if refusal is client_limits.NO_SEAT:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Closing on bytes that were not read would reset the connection before the answer is read."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(client_limits.LINGER_S, self.transport.abort)

    def _release(self) -> None:
        self._guard.release(self.num_held_bytes)
        self.num_held_bytes = 0
