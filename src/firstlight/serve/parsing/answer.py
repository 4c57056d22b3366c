"""One answer through its parsers: what the model thinks, what it says, what it calls.

Each choice has its own, driven token by token. Invariant: without parsers, content is the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from firstlight.serve.parsing.parser import ReasoningParser, ToolCallPiece, ToolParser


@dataclass
class Parsed:
    """What a piece of text completes."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


class AnswerParser:
    """`one_call`: the answer is complete with its first call."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, one_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def is_complete(self) -> bool:
        """Whether what follows is not wanted."""
        return self._one_call and self._tools is not None and self._tools.num_ended > 0

    def push(self, text: str) -> Parsed:
        """What this text completes."""
        thought, said = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._parsed(thought, said)

    def flush(self) -> Parsed:
        """What was held back, at the end of the answer."""
        thought, said = ("", "") if self._reasoning is None else self._reasoning.flush()
        parsed = self._parsed(thought, said)
        if self._tools is not None and not self.is_complete:
            last = self._tools.flush()
            parsed.content += last.content
            parsed.calls += last.calls
        return parsed

    def _parsed(self, thought: str, said: str) -> Parsed:
        if self._tools is None:
            return Parsed(thought, said)
        parsed = Parsed(thought)
        for piece in said if self._one_call else [said]:  # one character at a time ends where the call does
            if not self.is_complete:
                found = self._tools.push(piece)
                parsed.content += found.content
                parsed.calls += found.calls
        return parsed
