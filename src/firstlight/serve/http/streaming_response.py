"""One answer that takes time: whole or as server-sent events, until it is done, too late, or unwanted.

A handler returns an `Exchange`; its work writes through a `Reply`. Raw ASGI, as this is the path of every
token. Invariant: when the client goes away or the time is over, the work is cancelled, and its own `finally`
blocks free what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import monotonic

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstlight.base.errors import RequestError
from firstlight.serve.http.errors import error_bytes, error_headers, internal_error

_LAST_WORD_S = 1.0  # for an error to a client that may not be reading
_DONE = b"data: [DONE]\n\n"


class Reply:
    """What the work writes to: either one `json`, or `event`s and then `done`."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers
        self._streams = False
        self.is_complete = False

    async def json(self, body: bytes) -> None:
        """The whole answer."""
        await self._whole(200, body, {})

    async def event(self, data: bytes) -> None:
        """One server-sent event. The first one begins the answer."""
        body = b"data: " + data + b"\n\n"
        if not self._streams:
            self._streams = True
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
            await self._start(200, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def done(self) -> None:
        """The end of a stream."""
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def error(self, error: RequestError) -> None:
        """An error: with its own status if nothing was sent yet, else as an event of the stream."""
        if self.is_complete:
            return
        if self._streams:
            await self.event(error_bytes(error))
            await self.done()
        else:
            await self._whole(error.status, error_bytes(error), error_headers(error))

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.is_complete = True
        size = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**size, **headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (self._headers | headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class Exchange(Response):
    """A response that runs `work` until it is done, the client is gone, or `timeout_s` is over."""

    def __init__(
        self, request_id: str, work: Callable[[Reply], Awaitable[None]], *, timeout_s: float, started_s: float
    ) -> None:
        super().__init__()
        self._request_id = request_id
        self._work = work
        self._timeout_s = timeout_s
        self._deadline_s = started_s + timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, {"x-request-id": self._request_id})
        work = asyncio.ensure_future(self._run(reply))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            left_s = self._deadline_s - monotonic()
            await asyncio.wait((work, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            if not gone.done():
                await self._too_late(reply)
        finally:
            gone.cancel()
            work.cancel()

    async def _run(self, reply: Reply) -> None:
        try:
            await self._work(reply)
        except RequestError as error:
            await reply.error(error)
        except Exception:  # noqa: BLE001 - the top of a request: it becomes a logged 500
            await reply.error(internal_error())

    async def _too_late(self, reply: Reply) -> None:
        error = RequestError(
            f"The request took longer than {self._timeout_s:g} s (--request-timeout). Ask for fewer tokens, "
            "or try when the server is less busy.",
            code="request_timeout",
            status=504,
            kind="timeout_error",
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reply.error(error), _LAST_WORD_S)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
