"""Values of the flags of `firstlight plan`: sizes, rates, lists of measured times.

Invariant: a value that cannot be read is a `UsageError` that names its flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from firstlight.base.errors import UsageError
from firstlight.base.resolve_config import parse_size

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT])?B?(?:/S)?")
_RATE_UNITS = {None: 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
POINTS_HINT = "Give SIZE:MICROSECONDS in a comma-separated list, as 4K:45,64K:344."


def size(flag: str, text: str, least: int = 1) -> int:
    """Bytes of "96G"."""
    return int(_parsed(flag, text, parse_size, least, "Give a size, as 96G or 900M."))


def rate(flag: str, text: str) -> float:
    """Bytes a second of "1.8TB/s"; decimal, as rates are told."""

    def parse(text: str) -> float:
        match = _RATE.fullmatch(text.strip().upper())
        if match is None:
            raise ValueError(text)
        return float(match[1]) * _RATE_UNITS[match[2]]

    return _parsed(flag, text, parse, 1, "Give bytes in a second, as 1.8TB/s or 25GB/s (decimal).")


def points(flag: str, text: str) -> list[tuple[int, float]]:
    """Bytes and seconds of "4K:45,64K:344", which has microseconds."""
    found = []
    for pair in text.split(","):
        nbytes, _, time = pair.partition(":")
        try:
            found.append((parse_size(nbytes), _positive(time) * 1e-6))
        except ValueError as error:
            raise UsageError(f"{flag} has {pair!r}, which is no SIZE:MICROSECONDS.", POINTS_HINT) from error
    return found


def observed(flag: str, text: str) -> tuple[int, float, float]:
    """Drafts, acceptance and gain of "3:0.15:0.66"."""
    wrong = UsageError(
        f"{flag} {text!r} is no K:ACCEPTANCE:GAIN.",
        "Give drafts, accepted over drafted, and tokens a second over those without drafts: 3:0.15:0.66.",
    )
    parts = text.split(":")
    try:
        num, acceptance, gain = int(parts[0]), float(parts[1]), _positive(parts[2])
    except (ValueError, IndexError) as error:
        raise wrong from error
    if num < 1 or not 0.0 <= acceptance <= 1.0 or len(parts) != 3:
        raise wrong
    return num, acceptance, gain


def _parsed(flag: str, text: str, parse: Callable[[str], float], least: int, hint: str) -> float:
    try:
        value = parse(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r} cannot be read.", hint) from error
    if value < least:
        raise UsageError(f"{flag} {text!r} is too small.", hint)
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise ValueError(text)
    return value
