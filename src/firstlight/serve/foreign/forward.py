"""Handing one request on to the foreign engine, and its answer back, byte for byte as it comes.

The innermost ASGI application of `serve.relay`. Invariants: a body larger than the limit is never kept; the
headers that belong to one connection only are not handed on; when the client leaves, the time is over or the
engine is lost, the engine's work on the request is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from firstlight.base.config import ServerSection
from firstlight.base.errors import RequestError
from firstlight.serve.foreign.upstream import Upstream
from firstlight.serve.http.errors import error_bytes, error_response, internal_error

# Of one connection (RFC 9110, 7.6.1), ours to set, or a secret between the client and us.
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization")
    + (b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_SENT = _HOP_BY_HOP | {b"host", b"content-length", b"authorization", b"expect"}
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
_STREAM = b"text/event-stream"
_VERDICT_S = 1.0


class Forward:
    """Every path that is not ours, within the limits of `server`."""

    def __init__(self, upstream: Upstream, server: ServerSection) -> None:
        self._upstream = upstream
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(scope, receive, send)
        late_s = monotonic() + self._server.request_timeout_s
        try:
            body = await _body(scope, receive, self._server.max_body_bytes)
        except RequestError as error:
            await answer.fail(error)
            return
        if body is None:  # the client left while it sent
            return
        with self._upstream.opened() as ended:
            work = asyncio.ensure_future(self._work(scope, body, answer))
            gone = asyncio.ensure_future(_until_gone(receive))
            try:
                await asyncio.wait(
                    (work, gone, ended), timeout=late_s - monotonic(), return_when=asyncio.FIRST_COMPLETED
                )
                if work.done():
                    work.result()
                    return
                await _cancelled(work)
                if ended.done():
                    await answer.fail(ended.result())
                elif not gone.done():
                    await answer.fail(self._too_late())
            finally:
                await _cancelled(work)
                await _cancelled(gone)

    async def _work(self, scope: Scope, body: bytes, answer: _Answer) -> None:
        try:
            await self._exchange(scope, body, answer)
        except httpx.HTTPError as error:
            # Of an engine that died the supervisor says why in a moment, and that ends this task.
            await asyncio.sleep(_VERDICT_S)
            await answer.fail(self._upstream.unreachable(error))
        except Exception:  # noqa: BLE001 - the top of a request: it becomes a logged 500
            await answer.fail(internal_error())

    async def _exchange(self, scope: Scope, body: bytes, answer: _Answer) -> None:
        client = self._upstream.client
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = client.base_url.copy_with(raw_path=scope.get("raw_path", scope["path"].encode()) + query)
        headers = _kept(scope["headers"], _NOT_SENT)
        request = client.build_request(scope["method"], url, headers=headers, content=body or None)
        response = await client.send(request, stream=True)
        try:
            await answer.start(response)
            async for chunk in response.aiter_raw():
                self._upstream.note_piece()
                await answer.chunk(chunk)
            await answer.end()
        finally:
            await response.aclose()

    def _too_late(self) -> RequestError:
        return RequestError(
            f"The request took longer than {self._server.request_timeout_s:g} s (--request-timeout). Ask for "
            "fewer tokens, or try when the server is less busy.",
            code="request_timeout",
            status=504,
            kind="timeout_error",
        )


class _Answer:
    """What the client gets: the engine's answer, or an error in the form that still fits."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_started = self._is_stream = self._is_complete = False

    async def start(self, response: httpx.Response) -> None:
        """Status and headers."""
        headers = [
            (name.lower(), value)
            for name, value in _kept(response.headers.raw, _NOT_RETURNED)
            # Which web pages may read answers is said by --cors-origin, and by nobody else.
            if not name.lower().startswith(b"access-control-")
        ]
        self._has_started = True
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self._is_stream = kind.startswith(_STREAM)
        status = response.status_code
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        """A part of the body, as it came."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The engine has said all."""
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: RequestError) -> None:
        """The error with its status, as the last event of a stream, or as a connection that breaks."""
        if self._is_complete:
            return
        if not self._has_started:
            self._is_complete = True
            closes = {"connection": "close"} if error.status in (413, 503) else {}
            await error_response(error, closes)(self._scope, self._receive, self._send)
        elif self._is_stream:
            await self.chunk(b"data: " + error_bytes(error) + b"\n\ndata: [DONE]\n\n")
            await self.end()


async def _body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body; None when the client left. Raises `RequestError` for one that is too large."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()  # not a list of parts: a part of one byte would take forty
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body"):
            return bytes(body)


def _kept(headers: list[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that are handed on: none of `dropped`, nor those that Connection names."""
    named = {
        token.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in dropped | named]


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"The body is larger than the {max_bytes} bytes that this server takes (--max-body). Send less.",
        code="body_too_large",
        status=413,
    )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
