"""Ids of requests: ours, which are unique, and a client's x-request-id, which is for tracing and need not be.

Invariant: what a client sends as its id is kept short and printable before it goes into a header, a log or an
id of ours.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
# What tracers use: UUIDs, W3C trace ids, "Root=1-5f84c7a1-…" of a load balancer.
_CLIENTS = re.compile(r"[A-Za-z0-9_.:;=+/@~-]{1,128}")


def client_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id that a client sent; empty without one, and where it is too long or holds other characters."""
    given = next((value for name, value in headers if name == HEADER), b"").decode("latin-1")
    return given if _CLIENTS.fullmatch(given) else ""


def new_id(kind: str, given: str = "") -> str:
    """An id of ours, such as "cmpl-…", with the client's in it where there is one."""
    number = secrets.token_hex(12)
    return f"{kind}-{given}-{number}" if given else f"{kind}-{number}"


def is_called(request_id: str, name: str) -> bool:
    """Whether an id of ours is meant by `name`: itself, or the client's that it was made of."""
    return request_id == name or request_id.partition("-")[2].rpartition("-")[0] == name
