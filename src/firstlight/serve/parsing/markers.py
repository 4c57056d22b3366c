"""Markers in a stream of text, however it is cut: hold back only what may be the beginning of one.

Invariant: the texts and markers that come out, joined, are the text that went in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence


@functools.cache
def _prepared(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """What finds a marker, and all beginnings of one. Families have a handful of sets of markers."""
    beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))), beginnings


class MarkerScanner:
    """Splits text at any of `markers`, of which none is the beginning of another."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._pattern, self._beginnings = _prepared(tuple(markers))
        self._longest = max(map(len, markers))
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, str]]:
        """Pairs of text and the marker behind it; the last one's marker is empty."""
        text = self._held + text
        start = 0
        for found in self._pattern.finditer(text):
            yield text[start : found.start()], found[0]
            start = found.end()
        cut = self._cut(text, start)
        self._held = text[cut:]
        yield text[start:cut], ""

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, start: int) -> int:
        """Where what may be the beginning of a marker begins."""
        first = max(start, len(text) - self._longest + 1)
        return next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))
