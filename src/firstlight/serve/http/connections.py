"""What all connections of the public side share: their seats, their deadlines, the memory of their bodies.

Invariant: bodies whose requests have not been answered hold at most `max_held_bytes` together, and whoever is
refused for it holds most.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from time import monotonic

from firstlight.base.accepting import most_connections
from firstlight.base.client_limits import Guest, Refusal, Seats
from firstlight.base.config import ServerSection
from firstlight.base.errors import RequestError
from firstlight.serve.http.errors import error_bytes

log = logging.getLogger(__name__)
MIN_BODY_BYTES_PER_S = 16 * 1024  # a body that comes faster has as long as it needs
_TELL_S = 10.0
_BODIES = 32  # of the largest size that one request may have
BUSY = Refusal(
    503,
    "busy",
    "The bodies of the requests at work take as much memory as this server gives them. Try again a little "
    "later, or send less at once.",
    "Service Unavailable",
)


class Guard:
    """Limits of `section`; without one, of a socket that only we can reach. `count` hears of refusals."""

    def __init__(
        self, section: ServerSection | None = None, count: Callable[[int], None] | None = None
    ) -> None:
        limits = section or ServerSection()
        self.header_timeout_s = limits.header_timeout_s
        self.body_timeout_s = limits.body_timeout_s
        self.max_held_bytes = _BODIES * limits.max_body_bytes
        self._num_held_bytes = 0
        self._count = count
        self._untold: Counter[str] = Counter()
        self._told_s = -_TELL_S
        most = sys.maxsize if section is None else most_connections(limits.max_connections, may_raise=True)
        self.seats = Seats(most)

    def hold(self, holder: Guest, num_bytes: int) -> Guest | None:
        """`holder` holds so many bytes more; who must be refused for it, which may be itself."""
        self._num_held_bytes += num_bytes
        if self._num_held_bytes <= self.max_held_bytes:
            return None
        return max((holder, *self.seats.waiting), key=lambda other: other.num_held_bytes)

    def release(self, num_bytes: int) -> None:
        """So many bytes are held no longer."""
        self._num_held_bytes -= num_bytes

    def refused(self, refusal: Refusal) -> None:
        """A connection is refused. The first is logged at once, then all of some seconds in one line."""
        if self._count is not None:
            self._count(refusal.status)
        self._untold[refusal.code] += 1
        if monotonic() - self._told_s >= _TELL_S:
            counted = ", ".join(f"{number} times {code}" for code, number in sorted(self._untold.items()))
            log.warning("connections refused: %s; the last: %s", counted, refusal.message)
            self._untold.clear()
            self._told_s = monotonic()


def answer_of(refusal: Refusal) -> bytes:
    """The answer as it goes over the wire; it closes the connection."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    body = error_bytes(RequestError(refusal.message, code=refusal.code, status=refusal.status, kind=kind))
    retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
    head = (
        f"HTTP/1.1 {refusal.status} {refusal.phrase}\r\ncontent-type: application/json\r\n{retry}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
