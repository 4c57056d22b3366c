"""One line of log and one count for every answer.

The outermost ASGI layer, made by `serve.app`. Invariant: a line never holds a header or a body, so no key
and no prompt reaches the log.
"""

from __future__ import annotations

import logging
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.serve.metrics import Metrics

log = logging.getLogger("firstlight.access")
_CLIENT_LEFT = 499  # as nginx calls it: nothing was answered, because nobody was there any more
# Asked many times a minute by machines, also while the model loads; a line for each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/health/live", "/metrics"})


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
        status, is_complete = 0, False

        async def watched(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                is_complete = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._record(scope, status, is_complete, monotonic() - started_s)

    def _record(self, scope: Scope, status: int, is_complete: bool, took_s: float) -> None:
        if not is_complete and status == 0:
            status = _CLIENT_LEFT
        # The route's pattern, not the path: a scanner must not make the metrics grow.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.record_answer(route, status)
        if not is_complete:
            self._metrics.record_disconnect()
        if scope["path"] in _QUIET_PATHS:
            return
        end = "" if is_complete else ", the client left"
        log.info("%s %s %s, %.1f ms%s", scope["method"], scope["path"], status, 1000 * took_s, end)
