"""What the supervisor tells the api process, one JSON line an order, through a pair of sockets.

Invariant: its end is an order too: the supervisor has gone.
"""

from __future__ import annotations

from typing import Any

import msgspec

LOST = "lost"  # what /startup says of an engine that is refused for good


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Take clients on the public socket. `startup`: what /startup shows from now on."""

    startup: dict[str, Any]


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """End open requests with this error and answer new ones 503 with it.

    `for_good`: the engine is dead, and nobody has to wait for it.
    """

    message: str
    hint: str
    for_good: bool = False


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """The last `Refuse` is withdrawn."""


Order = Accept | Refuse | Resume

_decoder = msgspec.json.Decoder(Order)


def encode_order(order: Order) -> bytes:
    """A line with its end."""
    return msgspec.json.encode(order) + b"\n"


def decode_order(line: bytes) -> Order:
    """Raises `msgspec.DecodeError`."""
    return _decoder.decode(line)
