"""Reasoning between two tags, such as <think> and </think>, at the beginning of an answer.

The prompt may have opened it already; a model may open it once more, forget to close it before it calls a
tool, or close it although it was never open. Invariant: text behind the first word of the content is never
looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.serve.parsing.markers import MarkerScanner

_BEFORE, _REASONING, _CONTENT = range(3)


class TaggedReasoning:
    """A `ReasoningParser`. `ends`: markers that end the reasoning and belong to what comes behind it."""

    def __init__(self, opening: str, closing: str, *, is_open: bool, ends: Sequence[str] = ()) -> None:
        self._opening, self._closing, self._ends = opening, closing, frozenset(ends)
        self._scanner = MarkerScanner((opening, closing, *ends))
        self._state = _REASONING if is_open else _BEFORE
        self._blank: str | None = ""  # white space at the beginning of this state; None: other text has come

    @property
    def is_reasoning(self) -> bool:
        return self._state == _REASONING

    def push(self, text: str) -> tuple[str, str]:
        if self._state == _CONTENT:
            return "", text
        return self._take(list(self._scanner.push(text)))

    def flush(self) -> tuple[str, str]:
        if self._state == _CONTENT:
            return "", ""
        reasoning, rest = self._take([(self._scanner.flush(), "")])
        blank, self._blank = self._blank or "", None
        return (reasoning + blank, rest) if self.is_reasoning else (reasoning, rest + blank)

    def _take(self, pairs: list[tuple[str, str]]) -> tuple[str, str]:
        reasoning, rest = "", ""
        for text, marker in pairs:
            if self._state == _CONTENT:
                rest += text + marker
                continue
            shown = self._without_blank(text)
            if self._state == _REASONING:
                reasoning += shown
            elif shown:
                self._state = _CONTENT
                rest += shown + marker
                continue
            if marker:
                thought, said = self._at_marker(marker)
                reasoning, rest = reasoning + thought, rest + said
        if self._state == _CONTENT:  # what the scanner still holds is text now
            rest += self._scanner.flush()
        return reasoning, rest

    def _at_marker(self, marker: str) -> tuple[str, str]:
        if marker in self._ends:
            blank = "" if self.is_reasoning else self._blank or ""
            self._state = _CONTENT
            return "", blank + marker
        if marker == self._closing:
            self._state, self._blank = _BEFORE, ""
            return "", ""
        if self._blank is None:  # an opening tag in the middle of a thought
            return marker, ""
        self._state, self._blank = _REASONING, ""
        return "", ""

    def _without_blank(self, text: str) -> str:
        """White space is kept until it is known what it belongs to."""
        if self._blank is None or not text:
            return text
        if text.isspace():
            self._blank += text
            return ""
        text, self._blank = self._blank + text, None
        return text
