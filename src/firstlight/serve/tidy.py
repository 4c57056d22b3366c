"""A request as all layers and handlers see it: a plain path, and GET for HEAD.

The outermost ASGI layer, made by `serve.layers`. Invariant: a path has no doubled slashes and none at its
end, so that no way of writing it leads around a layer.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.strangers import plain_path


class Tidy:
    """Makes requests plain."""

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
