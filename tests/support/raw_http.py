"""HTTP as bytes on a socket, for what no client library would send.

Used by the tests of `serve`. Invariant: a read ends when the server closes, also by a reset.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from support.api_server import ApiServer
from support.fake_engine import DEADLINE_S

CHAT = "/v1/chat/completions"
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(server: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=DEADLINE_S)


def read_all(raw: socket.socket) -> bytes:
    """Everything until the server closes; what a reset cuts off is not there."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while part := raw.recv(65536):
            parts.append(part)
    return b"".join(parts)


def send(raw: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        raw.sendall(data)


def error_in(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def post(body: bytes, length: int | None = None, path: str = CHAT) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}"
    return head.encode() + b"\r\n\r\n" + body


def filled(size: int) -> bytes:
    """A head of just so many bytes."""
    rest = size - len(HEAD) - len(b"X: \r\n\r\n")
    return HEAD + b"X: " + b"a" * rest + b"\r\n\r\n"
