"""Whether a request carries a key: the one comparison, for the api process and for what answers before it.

Standard library only. Invariant: the time a refusal takes says nothing about the keys: digests of equal
length are compared, and always all of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

REFUSAL = "A valid API key is needed; send the header 'Authorization: Bearer KEY'."


def key_digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """What `carries_key` compares with."""
    return tuple(_digest(key.encode()) for key in keys)


def carries_key(authorization: bytes, digests: Sequence[bytes]) -> bool:
    """Whether the value of an Authorization header is a bearer token of one of these keys."""
    scheme, _, key = authorization.strip().partition(b" ")
    digest = _digest(key.strip())
    found = False
    for known in digests:
        found |= hmac.compare_digest(digest, known)
    return found and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
