"""API keys: who may use which paths.

An ASGI layer around the application, made by `serve.app` when keys are configured. Invariant: the time a
refusal takes says nothing about the keys: digests of equal length are compared, and always all of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.errors import RequestError
from firstlight.serve.errors import error_response

# Probes and the description of the API are open; everything else needs a key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/docs", "/openapi.json"})


class KeyCheck:
    """Lets a request pass that carries one of `keys` as a bearer token."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "A valid API key is needed; send the header 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            status=401,
            kind="authentication_error",
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
