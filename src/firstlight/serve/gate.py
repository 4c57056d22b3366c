"""Who may pass before the engine serves: nobody but probes; everyone else gets 503 and the reason.

An ASGI layer around the application, made by `serve.app`. Invariant: a handler runs only while the engine is
ready, and a 503 closes its connection, so that no client stays with a server that ends.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.errors import RequestError
from firstlight.engine.messages import Progress
from firstlight.serve.client import EngineClient
from firstlight.serve.errors import error_response

OPEN_PATHS = frozenset({"/health/live", "/metrics", "/docs", "/openapi.json"})


class Gate:
    """Answers 503 until the engine is ready, after it failed, and while the server stops."""

    def __init__(self, app: ASGIApp, client: EngineClient) -> None:
        self._app = app
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._client.is_serving or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        await error_response(unavailable(self._client), {"connection": "close"})(scope, receive, send)


def unavailable(client: EngineClient) -> RequestError:
    """Why the engine does not serve, and when to ask again."""
    if client.failure is not None:
        hint = f" {client.failure.hint}" if client.failure.hint else ""
        return _unavailable(f"The engine failed: {client.failure.message}.{hint}", "engine_failed", 10.0)
    if client.is_draining:
        return _unavailable("The server is stopping; ask another one.", "stopping", 5.0)
    return _unavailable(f"The model is not ready yet: {_where(client.progress)}.", "starting", 1.0)


def _where(progress: Progress | None) -> str:
    if progress is None:
        return "the engine process is starting"
    text = f"phase {progress.phase}"
    if progress.total:
        share = 100 * progress.done // progress.total
        text += f", {progress.done} of {progress.total} {progress.unit} ({share} %)"
    return f"{text}, {progress.detail}" if progress.detail else text


def _unavailable(message: str, code: str, retry_after_s: float) -> RequestError:
    return RequestError(message, code=code, status=503, kind="server_error", retry_after_s=retry_after_s)
