"""What answers on the public port while the engine does not: 503 with the reason, and how far the start is.

It answers from the first moment until the api process takes over, and again when the engine or the api
process is lost. Standard library only, as it answers before anything else is imported. Invariants: every
answer says `Connection: close`, so that no client stays with it; nothing a client sends or leaves unread
holds it up for long, and half a request gives way to a whole one.
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
from http import HTTPStatus
from typing import Any

from firstlight.base import client_limits
from firstlight.base.accepting import Door, TaskGuest, most_connections
from firstlight.base.bearer import REFUSAL, carries_key, key_digests
from firstlight.base.client_limits import Refusal, Seats
from firstlight.base.disposable_child import require_answer

_HEAD_DEADLINE_S = 30.0  # as an api process has it by default
_WRITE_DEADLINE_S = 10.0
_MAX_CONNECTIONS = 1024
_MAX_WATCHERS = 64  # streams of events, which last as long as the start does
_EVENT_INTERVAL_S = 0.25
_KEEP_ALIVE_S = 10.0  # a comment on an event stream without news, so that proxies do not close it
_OPEN_PATHS = frozenset({"/health", "/health/live", "/ping"})
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
        self._door: Door | None = None
        self._seats = Seats(most_connections(_MAX_CONNECTIONS))
        self._num_watchers = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()

    def protect(self, keys: Sequence[str], tls_cert: str | None = None, tls_key: str | None = None) -> None:
        """Ask for one of `keys`, and speak TLS, on connections of the next `open`."""
        self._digests = key_digests(key.strip() for key in keys)
        if tls_cert is not None and tls_key is not None:
            require_answer(tls_cert, tls_key)
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
        if self._door is None:
            # A copy of the descriptor: closing it does not close the socket, which others accept on later.
            self._door = Door(listener.dup(), self._protocol, self._seats, self._tls, _HEAD_DEADLINE_S)

    async def _pause(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _protocol(self) -> asyncio.Protocol:
        reader = asyncio.StreamReader(limit=client_limits.MAX_HEAD_BYTES, loop=self._loop)
        return asyncio.StreamReaderProtocol(reader, self._serve, loop=self._loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = TaskGuest()
        try:
            if self._seats.take(guest):
                await self._answer(reader, writer, guest)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client left, or does not read
        except asyncio.CancelledError:
            pass  # the front ends and with it this task, or somebody else needs the seat
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                writer.close()
                async with asyncio.timeout(_WRITE_DEADLINE_S):
                    await writer.wait_closed()
            writer.transport.abort()  # whoever does not read its answer does not hold the connection
            self._seats.leave(guest)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest: TaskGuest
    ) -> None:
        try:
            async with asyncio.timeout(_HEAD_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            await _refuse(reader, writer, client_limits.head_too_late(_HEAD_DEADLINE_S))
            return
        except asyncio.LimitOverrunError:
            await _refuse(reader, writer, client_limits.HEAD_TOO_LARGE)
            return
        lines = head.decode("latin-1").split("\r\n")
        fault = client_limits.fault_of_head(lines)
        method, _, rest = lines[0].partition(" ")
        path = client_limits.plain_path(rest.rpartition(" ")[0].partition("?")[0])
        if fault is None and not path.startswith("/"):
            fault = client_limits.NO_HTTP
        if fault is not None:
            await _refuse(reader, writer, fault)
            return
        self._seats.works(guest)
        if path == "/startup/events" and method in ("GET", "HEAD") and self._is_allowed(path, lines):
            await self._watch(writer, method)
        else:
            response = self._respond(method, path, lines)
            await _send(
                writer, response if method != "HEAD" else response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            )
        self._seats.waits(guest)
        await _linger(reader, writer)

    async def _watch(self, writer: asyncio.StreamWriter, method: str) -> None:
        if method == "HEAD":
            await _send(writer, _head(200, "text/event-stream", {"Cache-Control": "no-store"}))
            return
        if self._num_watchers >= _MAX_WATCHERS:
            text = f"{_MAX_WATCHERS} clients watch this start already; ask /startup instead."
            await _send(writer, _error(503, text, "too_many_connections", retry_after_s=5))
            return
        self._num_watchers += 1
        try:
            await self._stream(writer)
        finally:
            self._num_watchers -= 1

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


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: Refusal) -> None:
    await _send(writer, _error(refusal.status, refusal.message, refusal.code, kind="invalid_request_error"))
    await _linger(reader, writer)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(_WRITE_DEADLINE_S):
        await writer.drain()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the client read the answer: closing on bytes that were not read would reset its connection."""
    if writer.can_write_eof():
        writer.write_eof()
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(client_limits.LINGER_S):
            while num_bytes < client_limits.LINGER_BYTES and (data := await reader.read(65536)):
                num_bytes += len(data)


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
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *(f"{name}: {value}" for name, value in rows.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
