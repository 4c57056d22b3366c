"""What answers on the public port while the engine does not: 503 with the reason, and how far the start is.

Run by the supervisor in a thread of its own. It answers from the first moment until the api process takes
over, and again when the engine or the api process is lost. Standard library only, as it answers before
anything else is imported. Invariants: every answer says `Connection: close`, so that no client stays with
it; nothing a client sends or leaves unread holds it up for long, and half a request gives way to a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.base.bearer import REFUSAL, carries_key, key_digests

_MAX_HEAD_BYTES = 64 * 1024
_HEAD_DEADLINE_S = 10.0
_HANDSHAKE_S = 10.0  # of TLS
_WRITE_DEADLINE_S = 10.0
_LINGER_S = 1.0  # how long a client may go on sending a body that nobody reads
_MAX_CONNECTIONS = 1024
_EVENT_INTERVAL_S = 0.25
_KEEP_ALIVE_S = 10.0  # a comment on an event stream without news, so that proxies do not close it
_OPEN_PATHS = frozenset({"/health", "/health/live"})
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
# A stream of events ends when the picture has one of these.
_LAST = frozenset({"ready", "failed"})
_DEAD = frozenset({"lost", "failed"})


@dataclass(frozen=True)
class Picture:
    """What there is to say at one moment.

    `status`: "starting", "ready", "failed", "lost" or "stopping"; `message`: the error's text; `startup`: the
    whole state as JSON values, for /startup.
    """

    status: str = "starting"
    message: str = "The server is starting: phase spawn, it reads its options."
    retry_after_s: int = 1
    startup: dict[str, Any] = field(default_factory=lambda: {"status": "starting", "phase": "spawn"})


class Front:
    """Answers on a listening socket that it does not own. `publish` may be called from any thread."""

    def __init__(self, picture: Picture | None = None) -> None:
        self._picture = picture or Picture()
        self._start_s = time.monotonic()
        self._digests: tuple[bytes, ...] = ()
        self._tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], None] = {}
        self._waiting: dict[asyncio.Task[Any], None] = {}  # for a whole request, the longest first
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()

    def protect(self, keys: Sequence[str], tls_cert: str | None = None, tls_key: str | None = None) -> None:
        """Ask for one of `keys`, and speak TLS, on connections of the next `open`."""
        self._digests = key_digests(key.strip() for key in keys)
        if tls_cert is not None and tls_key is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # Nobody is there to be asked for a passphrase: a key that has one is an error.
            self._tls.load_cert_chain(tls_cert, tls_key, password=lambda: "")

    def open(self, listener: socket.socket) -> None:
        """Answer on `listener`; returns when it does."""
        self._call(self._open(listener))

    def pause(self) -> None:
        """Accept nothing more; returns when that is so. What was accepted is still answered."""
        self._call(self._pause())

    def begin(self, start_s: float) -> None:
        """The start that is told of began at `start_s` on the monotonic clock; until now: with this front."""
        self._start_s = start_s

    def startup(self) -> dict[str, Any]:
        """What /startup shows at this moment, with the seconds since the start began."""
        return {**self._picture.startup, "elapsed_s": round(max(0.0, time.monotonic() - self._start_s), 3)}

    def publish(self, picture: Picture) -> None:
        """Say this from now on."""
        self._picture = picture
        self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """Stop answering and end the thread."""
        if self._thread.is_alive():
            self._call(self._pause())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_connections())
        finally:
            self._loop.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _end_connections(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0)  # a task that has not begun could not close its connection
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes its socket a turn after it was told

    async def _open(self, listener: socket.socket) -> None:
        if self._server is None:
            # A copy of the descriptor: closing it does not close the socket, which others accept on later.
            self._server = await asyncio.start_server(
                self._serve,
                sock=listener.dup(),
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
                limit=_MAX_HEAD_BYTES,
                backlog=2048,
            )

    async def _pause(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # A server that is closed in the turn in which it has accepted loses that connection unanswered.
            for listener in server.sockets:
                self._loop.remove_reader(listener.fileno())
            await asyncio.sleep(0)
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        self._waiting[task] = None
        try:
            if len(self._connections) > _MAX_CONNECTIONS:
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                longest.cancel()
            head = await self._head(reader, writer)
            self._waiting.pop(task, None)
            if head:
                await self._answer(head, writer)
            await _linger(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client left, or does not read
        except asyncio.CancelledError:
            pass  # the front ends and with it this task, or others need its place
        finally:
            self._connections.pop(task, None)
            self._waiting.pop(task, None)
            with contextlib.suppress(OSError):
                writer.close()

    async def _head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The head of a request; empty after an answer to what does not become one."""
        try:
            async with asyncio.timeout(_HEAD_DEADLINE_S):
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            late = f"The head of the request did not come within {_HEAD_DEADLINE_S:.3g} s; send it faster."
            await _send(writer, _error(408, late, "request_too_slow", kind="invalid_request_error"))
        except asyncio.LimitOverrunError:
            long = f"The headers of the request are longer than {_MAX_HEAD_BYTES} bytes; send less in them."
            await _send(writer, _error(431, long, "headers_too_large", kind="invalid_request_error"))
        return b""

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.rpartition(" ")[0].partition("?")[0]
        if not path.startswith("/"):
            await _send(writer, _error(400, "This is not an HTTP request.", "bad_request"))
        elif path == "/startup/events" and method == "GET" and self._is_allowed(path, lines):
            await self._stream(writer)
        else:
            response = self._respond(method, path, lines)
            await _send(
                writer, response if method != "HEAD" else response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            )

    def _respond(self, method: str, path: str, lines: Sequence[str]) -> bytes:
        picture = self._picture
        if not self._is_allowed(path, lines):
            return _error(401, REFUSAL, "invalid_api_key", kind="authentication_error")
        if path == "/health/live" and method in ("GET", "HEAD") and picture.status not in _DEAD:
            return _response(200, {"status": "live"})
        if path == "/startup" and method in ("GET", "HEAD"):
            return _response(200, self.startup())
        return _error(503, picture.message, picture.status, retry_after_s=picture.retry_after_s)

    def _is_allowed(self, path: str, lines: Sequence[str]) -> bool:
        if not self._digests or path in _OPEN_PATHS:
            return True
        headers = (line.partition(":") for line in lines[1:])
        given = next((value for name, _, value in headers if name.strip().lower() == "authorization"), "")
        return carries_key(given.encode("latin-1"), self._digests)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        """Server-sent events: the picture whenever it changes, until it is final or the front ends."""
        writer.write(_head(200, "text/event-stream", {"Cache-Control": "no-store"}))
        sent: Picture | None = None
        try:
            while True:
                picture = self._picture
                is_news = sent is None or picture.startup != sent.startup
                writer.write(self._event(picture) if is_news else b": still here\n\n")
                sent = picture
                async with asyncio.timeout(_WRITE_DEADLINE_S):
                    await writer.drain()
                if picture.status in _LAST:
                    return
                await asyncio.sleep(_EVENT_INTERVAL_S)
                await self._news(picture)
        except asyncio.CancelledError:
            if self._picture is not sent and self._picture.status in _LAST:
                writer.write(self._event(self._picture))  # the verdict comes right before the end
            raise

    async def _news(self, picture: Picture) -> None:
        """Until there is another picture, for a bounded time."""
        self._changed.clear()
        if self._picture is picture:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await self._changed.wait()

    def _event(self, picture: Picture) -> bytes:
        name = picture.status if picture.status in _LAST else "progress"
        return f"event: {name}\ndata: {json.dumps(self.startup())}\n\n".encode()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(_WRITE_DEADLINE_S):
        await writer.drain()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the client read the answer: closing on bytes that were not read would reset its connection."""
    if writer.can_write_eof():
        writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(65536):
                pass


def _error(
    status: int, message: str, code: str, *, kind: str = "server_error", retry_after_s: int | None = None
) -> bytes:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _response(status, body, headers)


def _response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    data = json.dumps(body).encode()
    return _head(status, "application/json", {**(headers or {}), "Content-Length": str(len(data))}) + data


def _head(status: int, media_type: str, headers: dict[str, str]) -> bytes:
    rows = {"Content-Type": media_type, **headers, "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in rows.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
