"""Reading a request's body: within the limit, as UTF-8 JSON, or a clear error.

Invariant: never more than the limit is kept in memory.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from firstlight.base.errors import RequestError
from firstlight.serve.http.errors import CLIENT_GONE

_DECODER = msgspec.json.Decoder()


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body."""
    _check_media(request)
    return decode_json(await _read(request, max_bytes))


def decode_json(body: bytes) -> dict[str, Any]:
    """A JSON object from its bytes; a `RequestError` says where they are wrong."""
    if not body.strip():
        raise RequestError("The body is empty; send a JSON object.", code="invalid_json")
    try:
        value = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"The body is not valid JSON: {_explain(body, error)}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object, {...}.", code="invalid_json")
    return value


def _explain(body: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} is not UTF-8; JSON is always sent as UTF-8"
    text = str(error).removeprefix("JSON is malformed: ").partition(" - at `$")[0]
    if "truncated" in text:
        return "it is cut short, or a \\u escape in it is half of a surrogate pair"
    return f"{text[:1].lower()}{text[1:]}"


def _check_media(request: Request) -> None:
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _unsupported(
            f"The content type {kind!r} is not supported" if kind else "The content type is missing",
            "send the header 'Content-Type: application/json'",
        )
    charset = rest.lower().replace(" ", "").replace('"', "").removeprefix("charset=")
    if charset and "=" not in charset and charset not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"The charset {charset!r} is not supported", "send the body as UTF-8")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise _unsupported(f"The content encoding {encoding!r} is not supported", "send the body as it is")


def _unsupported(what: str, remedy: str) -> RequestError:
    return RequestError(f"{what}; {remedy}.", code="unsupported_media_type", status=415)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(f"has {length} bytes", max_bytes)
    body = bytearray()  # not a list of parts: a part of one byte would take forty
    try:
        async for part in request.stream():
            if len(body) + len(part) > max_bytes:
                raise _too_large("is larger", max_bytes)
            body += part
    except ClientDisconnect:
        raise RequestError(
            "The client went away while it sent the body.", code="client_gone", status=CLIENT_GONE
        ) from None
    return bytes(body)


def _too_large(what: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"The body {what}; this server takes at most {max_bytes} bytes (--max-body). Send less at once.",
        code="body_too_large",
        status=413,
    )
