"""How much of a server a stranger may take before it has asked anything: bytes, headers, and a seat.

Standard library only, as the startup responder runs before anything else is imported. Invariant: while
connections that have not sent a whole request hold seats, whoever comes gets the seat of the one that has
waited longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; also what may lie between two pieces of a body
MAX_HEADERS = 256
MAX_TARGET_BYTES = 16 * 1024
LINGER_S = 1.0  # how long a client may go on sending to whom has refused it, so that it reads the answer
LINGER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Refusal:
    """Why a request is not read: its status, its code, and a message with the remedy."""

    status: int
    code: str
    message: str
    phrase: str = "Bad Request"


NO_HTTP = Refusal(400, "invalid_http", "Invalid HTTP request received. Send HTTP/1.1.")
NO_HOST = Refusal(
    400, "invalid_http", "The request needs one Host header, as HTTP/1.1 asks for; send it once."
)
NO_TUNNEL = Refusal(
    405, "method_not_allowed", "This server is no proxy; send no CONNECT.", "Method Not Allowed"
)
HEAD_TOO_LARGE = Refusal(
    431,
    "headers_too_large",
    f"The request's headers are larger than the {MAX_HEAD_BYTES} bytes that this server reads. Send fewer or "
    "shorter headers; a prompt belongs into the body.",
    "Request Header Fields Too Large",
)
TOO_MANY_HEADERS = Refusal(
    431,
    "too_many_headers",
    f"The request has more than the {MAX_HEADERS} headers that this server reads. Send fewer.",
    "Request Header Fields Too Large",
)
TARGET_TOO_LONG = Refusal(
    414,
    "target_too_long",
    f"The request's target (path and query) is longer than the {MAX_TARGET_BYTES} bytes that this server "
    "reads. Send what is long in the body of a POST.",
    "URI Too Long",
)
NO_SEAT = Refusal(
    503,
    "too_many_connections",
    "The server has all the connections that it takes (--max-connections). Try again a little later.",
    "Service Unavailable",
)


def head_too_late(seconds: float, option: str = "") -> Refusal:
    """No whole head in time."""
    text = f"No whole request line with its headers came within {seconds:g} s{option}. Send it at once."
    return Refusal(408, "request_too_slow", text, "Request Timeout")


def body_too_late(seconds: float, option: str) -> Refusal:
    """No whole body in time."""
    text = f"The request's body was not complete within {seconds:g} s{option}. Send it faster, or send less."
    return Refusal(408, "request_too_slow", text, "Request Timeout")


def fault_of_head(lines: Sequence[str]) -> Refusal | None:
    """What is wrong with a whole head: its request line, and a line for each header."""
    method, _, rest = lines[0].partition(" ")
    target, _, version = rest.rpartition(" ")
    if not method or not target or not version.startswith("HTTP/1."):
        return NO_HTTP
    if len(target) > MAX_TARGET_BYTES:
        return TARGET_TOO_LONG
    names = [name.strip().lower() for name, _, _ in (line.partition(":") for line in lines[1:] if line)]
    if len(names) > MAX_HEADERS:
        return TOO_MANY_HEADERS
    hosts = names.count("host")
    return NO_HOST if hosts > 1 or (hosts == 0 and version != "HTTP/1.0") else None


def plain_path(path: str) -> str:
    """A path without doubled slashes and without one at its end: clients that join a base URL send both."""
    while "//" in path:
        path = path.replace("//", "/")
    return path.rstrip("/") or path[:1]


class Guest(Protocol):
    """A connection that holds a seat, and bytes of bodies."""

    num_held_bytes: int

    def give_way(self) -> None:
        """End at once: somebody else needs the seat."""


class Seats:
    """At most `limit` connections. A guest `waits` as long as it has not sent a whole request."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._waiting: dict[Guest, None] = {}  # the one that has waited longest first
        self._at_work: set[Guest] = set()

    @property
    def num_taken(self) -> int:
        """Connections that hold a seat."""
        return len(self._waiting) + len(self._at_work)

    @property
    def waiting(self) -> Sequence[Guest]:
        """Who has not sent a whole request, the one that has waited longest first."""
        return list(self._waiting)

    def take(self, guest: Guest) -> bool:
        """A seat for `guest`, which waits; False if everybody else is at work."""
        if self.num_taken >= self._limit and not self.give_one_up():
            return False
        self._waiting[guest] = None
        return True

    def give_one_up(self) -> bool:
        """Ends the connection that has waited longest; False if none waits."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.leave(longest)
        longest.give_way()
        return True

    def works(self, guest: Guest) -> None:
        """It has sent a whole request. Without effect for who has no seat."""
        if guest in self._waiting:
            del self._waiting[guest]
            self._at_work.add(guest)

    def waits(self, guest: Guest) -> None:
        """Its request is answered."""
        if guest in self._at_work:
            self._at_work.discard(guest)
            self._waiting[guest] = None

    def leave(self, guest: Guest) -> None:
        """The seat is free."""
        self._waiting.pop(guest, None)
        self._at_work.discard(guest)
