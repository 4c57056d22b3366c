"""A light HTTP/1.1 client for load generation: keep-alive connections and server-sent events, on asyncio.

It shares the cores of the server it measures, so it does per chunk only what must be done at once: note the
time and cut the events; decoding comes later. Invariant: cancelling a request closes its connection, which is
how a client that goes away looks to the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import httptools

from firstlight.base.urls import server_address

# Called with the time of arrival and the data of one event.
OnEvent = Callable[[float, bytes], None]
CONNECT_S = 10.0


@dataclass
class Reply:
    """Status and body; of an event stream the body is empty, as its events were handed out."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)


class HttpClient:
    """Requests to one server. Make it and use it inside one event loop; `close` ends its connections."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = server_address(url)
        self.base_url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc}\r\n{key}Accept: */*\r\n"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        on_event: OnEvent | None = None,
        headers: str = "",
    ) -> Reply:
        """One exchange. `headers` are whole lines. Raises `OSError` where the connection breaks off."""
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        message = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{headers}{content}\r\n".encode() + body
        )
        while True:
            connection, is_fresh = await self._connection()
            try:
                reply = await connection.exchange(message, on_event)
            except BaseException as error:
                connection.close()
                # An idle connection may have been closed by the server just when we took it.
                if isinstance(error, OSError) and not is_fresh and not connection.has_answered:
                    continue
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return reply

    async def close(self) -> None:
        """Ends all connections, and returns when they are gone."""
        for connection in self._open:
            connection.close()
        await asyncio.gather(*(connection.lost.wait() for connection in self._open))

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, False
        context = ssl.create_default_context() if self._tls else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        self._open = {other for other in self._open if not other.lost.is_set()} | {connection}
        return connection, True


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. The methods named on_... are called by the parser."""

    def __init__(self) -> None:
        self.is_reusable = True
        self.lost = asyncio.Event()
        self.has_answered = False  # since the last request was sent
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._reply = Reply()
        self._on_event: OnEvent | None = None
        self._rest = b""
        self._now_s = 0.0
        self._is_events = self._has_length = False

    async def exchange(self, message: bytes, on_event: OnEvent | None) -> Reply:
        assert self._transport is not None
        self._reply, self._on_event, self._rest = Reply(), on_event, b""
        self._is_events = self._has_length = self.has_answered = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._done
        return self._reply

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = perf_counter()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ConnectionError(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self.lost.set()
        if self._reply.status and not self._has_length and exc is None:
            self._finish(None)  # a body without a length ends with the connection
        else:
            self._finish(ConnectionResetError("the connection broke off before the answer was complete"))

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_events = value.startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_events or self._on_event is None:
            self._reply.body += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(self._now_s, line[5:].strip())

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive()
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
