"""Every error as OpenAI-shaped JSON: message, type, param, code.

`install` teaches the application to answer so for our own errors, for those of the framework (404, 405, ...)
and for bugs. Invariant: no error leaves the server in another shape, and no traceback leaves it at all.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from firstlight.base.errors import RequestError, as_sentence
from firstlight.engine.messages import FINISH_REJECTED, NOT_NUMBERS, SequenceOutput

log = logging.getLogger(__name__)
QUEUE_RETRY_S = 1.0
CLIENT_GONE = 499  # as nginx calls it: nobody is there to read the answer; a status for logs and metrics
# A failed engine is not restarted: the launcher ends the run, and prints the reason.


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, which parameter it is about, and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON of every error."""

    error: ErrorDetail


def error_bytes(error: RequestError) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(str(error), error.kind, error.param, error.code)))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that belong to an error."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return headers


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that cannot be served."""
    return Response(
        error_bytes(error),
        error.status,
        headers={**error_headers(error), **(headers or {})},
        media_type="application/json",
    )


def engine_error(output: SequenceOutput) -> RequestError:
    """The error of a sequence that was rejected, or lost by a failing engine."""
    reason = output.error or "no reason was given"
    if output.finish_reason == FINISH_REJECTED:
        if reason.startswith("queue full"):
            return RequestError(
                f"The server is busy ({reason}). Try again a little later.",
                code="queue_full",
                status=429,
                kind="rate_limit_error",
                retry_after_s=QUEUE_RETRY_S,
            )
        return RequestError(f"The engine refused the request: {reason}", code="rejected")
    if reason.startswith(NOT_NUMBERS):
        return RequestError(
            f"This request could not be answered: {as_sentence(reason)} Others are not touched; the same "
            "prompt will fail again.",
            code="logits_not_numbers",
            status=500,
            kind="server_error",
        )
    return RequestError(
        f"The engine failed while it worked on this request: {as_sentence(reason)} /health says more.",
        code="engine_failed",
        status=503,
        kind="server_error",
        retry_after_s=10.0,
    )


def internal_error() -> RequestError:
    """A bug of ours. The number in the message stands in the log beside the traceback."""
    number = secrets.token_hex(4)
    log.exception("internal error %s", number)
    return RequestError(
        f"Internal error {number}; the server's log says more under this number.",
        code="internal_error",
        status=500,
        kind="server_error",
    )


def install(app: FastAPI) -> None:
    """Answers every exception of `app` in the one shape."""

    @app.exception_handler(RequestError)
    async def _request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_framework_error(request, error), error.headers)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> Response:
        return error_response(internal_error())


def _framework_error(request: Request, error: HTTPException) -> RequestError:
    path = request.scope["path"][:200]
    if error.status_code == 404:
        return RequestError(
            f"There is no {path} here. /docs lists everything this server answers.",
            code="not_found",
            status=404,
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow") or "another method"
        return RequestError(
            f"{path} does not take {request.method}; use {allowed}.", code="method_not_allowed", status=405
        )
    return RequestError(str(error.detail), code="http_error", status=error.status_code)
