"""The layers around an application: who is logged, who is let in, who is told to wait.

Invariant: the layers are, from outside in: plain requests, access log, CORS, keys, readiness; so all see the
same path, and a refusal is logged, readable by browsers, and says nothing before the key was seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.base.bearer import REFUSAL, carries_key, key_digests
from firstlight.base.client_limits import plain_path
from firstlight.base.config import API_SOCKET, RunConfig
from firstlight.base.errors import RequestError
from firstlight.serve.http.errors import CLIENT_GONE, error_response
from firstlight.serve.http.metrics import Metrics
from firstlight.serve.http.readiness_gate import Gate, Serving
from firstlight.serve.http.request_ids import HEADER, client_id

# Probes and the description of the API are open; everything else needs a key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/ping", "/docs", "/openapi.json"})
log = logging.getLogger("firstlight.access")
# Asked many times a minute by machines, also while the model loads; a line for each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/health/live", "/ping", "/metrics"})


def with_layers(
    app: ASGIApp, config: RunConfig, client: Serving, metrics: Metrics, api_keys: Sequence[str] = ()
) -> ASGIApp:
    """`app` with all layers. Without keys it is open to whoever reaches its port."""
    gated: ASGIApp = Gate(app, client)
    layered = gated
    if api_keys:
        layered = KeyCheck(layered, api_keys)
    if config.server.cors_origins:
        layered = CORSMiddleware(
            layered,
            allow_origins=config.server.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    private = str(Path(config.run_dir) / API_SOCKET)
    return Tidy(PrivateDoor(private, gated, AccessLog(layered, metrics)))


class PrivateDoor:
    """The supervisor's way in: its socket lies in the private run directory, so it needs no key, and what it
    asks is no client's request."""

    def __init__(self, path: str, inside: ASGIApp, outside: ASGIApp) -> None:
        self._path = path
        self._inside = inside
        self._outside = outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        is_private = server is not None and server[0] == self._path
        await (self._inside if is_private else self._outside)(scope, receive, send)


class KeyCheck:
    """Lets a request pass that carries one of `keys` as a bearer token; what is open needs none."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = key_digests(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            REFUSAL,
            code="invalid_api_key",
            status=401,
            kind="authentication_error",
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return carries_key(given, self._digests)


class Tidy:
    """The outermost layer: a request as all others and the handlers see it.

    Its path has no doubled slashes and none at its end, so that no way of writing it leads around a layer;
    HEAD is GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The server knows by its own scope that the answer to HEAD has no body.
        plain: dict[str, Any] = {
            **scope,
            "path": plain_path(scope["path"]),
            "method": "GET" if scope["method"] == "HEAD" else scope["method"],
        }
        if "raw_path" in scope:
            plain["raw_path"] = plain_path(scope["raw_path"].decode("latin-1")).encode("latin-1")
        plain["state"] = scope.setdefault("state", {})
        plain["state"]["method"] = scope["method"]  # for the log
        await self._app(plain, receive, send)


class AccessLog:
    """One line of log and one count for every answer, and the client's own id in both line and answer.

    Of headers and bodies a line holds nothing but the request's id, so no key and no prompt reaches the log.
    """

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
