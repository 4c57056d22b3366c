"""The description of the API for /openapi.json and /docs.

Used by `serve.app`. Handlers read bodies and write answers themselves, so their types are described here.
Invariant: every type that a route names is in the document, and nothing is fetched from another host.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from firstlight.engine.messages import Profile
from firstlight.serve import replies
from firstlight.serve.errors import ErrorBody
from firstlight.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
)

_REFERENCE = "#/components/schemas/{}"
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ProfileRequest)
_REPLIES = (
    replies.ChatCompletion,
    replies.ChatChunk,
    replies.Completion,
    replies.Tokens,
    replies.Text,
    replies.ModelList,
    replies.Model,
    replies.Aborted,
    replies.Version,
    replies.TokenizerInfo,
    Profile,
    ErrorBody,
)


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose handler reads a `kind` from the body."""
    return {"requestBody": {"required": True, "content": _json(kind)}}


def gives(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with a `kind`, or with an error."""
    return {
        200: {"description": (kind.__doc__ or "").partition("\n")[0], "content": _json(kind)},
        "default": {"description": "An error.", "content": _json(ErrorBody)},
    }


def gives_text(description: str, media_type: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with a text."""
    return {200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}}


def describe(app: FastAPI) -> None:
    """Makes `app` describe itself with our own types."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, requests = models_json_schema(
        [(kind, "validation") for kind in _REQUESTS], ref_template=_REFERENCE.format("{model}")
    )
    _, answers = msgspec.json.schema_components(_REPLIES, ref_template=_REFERENCE.format("{name}"))
    document["components"] = {"schemas": {**requests.get("$defs", {}), **answers}}
    return document


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(kind.__name__)}}}
