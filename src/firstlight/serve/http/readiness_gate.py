"""Who may pass before the engine serves: nobody but probes; everyone else gets 503 and the reason.

An ASGI layer around the application, made by `serve.app`. Invariant: a handler runs only while the engine is
ready, and a 503 closes its connection, so that no client stays with a server that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.errors import RequestError
from firstlight.serve.engine_link.orders import LOST
from firstlight.serve.http.errors import error_response

OPEN_PATHS = frozenset({"/health/live", "/metrics", "/docs", "/openapi.json", "/startup", "/startup/events"})


class Serving(Protocol):
    """Whether the engine takes requests, and if not, why."""

    @property
    def is_serving(self) -> bool: ...

    def unavailable(self) -> RequestError: ...


class Gate:
    """Answers 503 until the engine is ready, after it failed, and while the server stops."""

    def __init__(self, app: ASGIApp, client: Serving) -> None:
        self._app = app
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._client.is_serving or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        await error_response(self._client.unavailable(), {"connection": "close"})(scope, receive, send)


def live_response(startup: Mapping[str, Any]) -> Response:
    """Whether the engine lives, be it stalled: 200; 503 with the verdict once it is lost for good.

    `startup`: what /startup shows.
    """
    if startup.get("status") != LOST:
        return JSONResponse({"status": "live"})
    verdict = startup.get("verdict", {})
    text = f"{verdict.get('message', 'The engine is lost.')} {verdict.get('what_to_do', '')}".strip()
    return error_response(RequestError(text, code=LOST, status=503, kind="server_error"))
