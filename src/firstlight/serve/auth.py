"""API keys: who may use which paths.

An ASGI layer around the application, made by `serve.app` when keys are configured. Invariant: what is not
open reaches the application only with a key.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.bearer import REFUSAL, carries_key, key_digests
from firstlight.base.errors import RequestError
from firstlight.serve.errors import error_response

# Probes and the description of the API are open; everything else needs a key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/ping", "/docs", "/openapi.json"})


class KeyCheck:
    """Lets a request pass that carries one of `keys` as a bearer token."""

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
