"""One line of log and one count for every answer, and the client's own id in both line and answer.

The outermost ASGI layer, made by `serve.layers`. Invariant: of headers and bodies a line holds nothing but
the request's id, so no key and no prompt reaches the log.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.serve.errors import CLIENT_GONE
from firstlight.serve.metrics import Metrics
from firstlight.serve.request_ids import HEADER, client_id

log = logging.getLogger("firstlight.access")
# Asked many times a minute by machines, also while the model loads; a line for each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/health/live", "/ping", "/metrics"})


class AccessLog:
    """Logs and counts what passes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = monotonic()
        status, is_complete = CLIENT_GONE, False
        request_id = client_id(scope["headers"]).encode()

        async def watched(message: Message) -> None:
            nonlocal status, is_complete, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", ()))
                request_id = request_id or headers.get(HEADER, b"")
                if request_id != headers.get(HEADER, b""):
                    rest = [item for item in message["headers"] if item[0] != HEADER]
                    message = {**message, "headers": [*rest, (HEADER, request_id)]}
            elif not message.get("more_body"):
                is_complete = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # the server ends, and this was open for too long
            status = 503 if status == CLIENT_GONE else status
            raise
        finally:
            status = scope["state"].get("refused", status)  # by the connection itself
            is_complete = is_complete and status != CLIENT_GONE
            self._count(scope, status, is_complete)
            if scope["path"] not in _QUIET_PATHS:
                end = f", id {request_id.decode('latin-1')}" if request_id else ""
                end += "" if is_complete else ", the client left"
                took_ms = 1000 * (monotonic() - started_s)
                method = scope["state"]["method"]
                log.info("%s %s %s, %.1f ms%s", method, scope["path"], status, took_ms, end)

    def _count(self, scope: Scope, status: int, is_complete: bool) -> None:
        # The route's pattern, not the path: a scanner must not make the metrics grow.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.record_answer(route, status)
        if not is_complete:
            self._metrics.record_disconnect()
