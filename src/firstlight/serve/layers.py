"""The layers around an application: who is logged, who is let in, who is told to wait.

Used by `serve.app` and by `serve.relay`. Invariant: the layers are, from outside in: plain requests, access
log, CORS, keys, readiness; so all see the same path, and a refusal is logged, readable by browsers, and says
nothing before the key was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.config import API_SOCKET, RunConfig
from firstlight.serve.access import AccessLog
from firstlight.serve.auth import KeyCheck
from firstlight.serve.gate import Gate, Serving
from firstlight.serve.metrics import Metrics
from firstlight.serve.tidy import Tidy


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
