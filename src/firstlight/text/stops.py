"""Stop strings in a stream of text: hold back only what may be the beginning of one.

One `StopMatcher` a sequence, used by the api process and by `LLM`. One automaton per stop string (Knuth,
Morris, Pratt), so the work is a few steps a character however the text is cut into pieces. Invariant: a
character is given out exactly once, in order, and never one that belongs to a stop string that was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string stands: characters [start, end) of all text pushed so far."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Finds the stop string that ends first; of several that end there, the longest.

    `include`: the stop string itself is part of the text. `match` is set once one was found; after that,
    nothing may be pushed.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Longest first: of several that end at one place the first found is the one that begins earliest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self._pushed = 0
        self.match: StopMatch | None = None

    @property
    def released(self) -> int:
        """How many characters were given out so far."""
        return self._pushed - len(self._held)

    def push(self, text: str) -> str:
        """The part of the text so far that can be given out now."""
        assert self.match is None, "text after a stop string"
        if not self._stops:
            self._pushed += len(text)
            return text
        for index, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None:
                end = self._pushed + index + 1
                return self._finish(text[: index + 1], StopMatch(matched, end - len(matched), end))
        return self._hold(self._held + text, len(text))

    def skip(self, text: str) -> str:
        """Text that is not searched, before any that is; given back unchanged."""
        assert not self._held, "text was searched already"
        self._pushed += len(text)
        return text

    def flush(self) -> str:
        """What was held back, at the end of a sequence that ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        found: str | None = None
        for number, stop in enumerate(self._stops):
            state, failures = self._states[number], self._failures[number]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop) and found is None:
                found = stop
            self._states[number] = state
        return found

    def _hold(self, text: str, num_new: int) -> str:
        self._pushed += num_new
        held = max(self._states)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def _finish(self, text: str, match: StopMatch) -> str:
        base = self._pushed - len(self._held)
        whole = self._held + text
        self._pushed += len(text)
        self._held = ""
        self.match = match
        return whole[: (match.end if self._include else match.start) - base]


def _failure_links(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix of `stop` too."""
    links = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = links[length - 1]
        if stop[index] == stop[length]:
            length += 1
        links[index] = length
    return links
