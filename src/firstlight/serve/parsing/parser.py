"""What a parser of a model's markup is: text in, as it comes; reasoning, content and tool calls out.

A parser knows text alone, so that it works for every tokenizer. Invariant: however the text is cut into
pieces, what comes out, joined, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


class ToolCallPiece(msgspec.Struct):
    """A part of a tool call. The first one of a call has its id and name; arguments are raw text."""

    index: int  # of the call within the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolText:
    """What a tool parser made of a piece of text."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


class ReasoningParser(Protocol):
    """Takes the beginning of an answer; splits off what the model thinks before it speaks."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning, and text behind it, that this completes."""
        ...

    def flush(self) -> tuple[str, str]:
        """The same for what was held back, at the end."""
        ...


class ToolParser(Protocol):
    """Takes the answer behind the reasoning; finds the calls in it."""

    @property
    def num_ended(self) -> int:
        """Calls that are complete."""
        ...

    def push(self, text: str) -> ToolText:
        """What this piece completes."""
        ...

    def flush(self) -> ToolText:
        """What was held back, at the end; a call that was cut off stays as it is."""
        ...


class ParserFamily(Protocol):
    """The markup of a family of models: how its parsers are made, and what requests need to know of it."""

    name: str
    architectures: frozenset[str]  # of models.registry that speak so
    call_begins: tuple[str, ...]  # what calls begin with, and reasoning may end with
    markers: tuple[str, ...]  # tokens that must reach the parsers, special or not
    thinks_after: str  # a prompt that ends so has opened the reasoning
    thinks_until: str
    thinking_variable: str  # of the chat template: false switches reasoning off

    def reasoning(self, *, is_open: bool, ends: Sequence[str]) -> ReasoningParser:
        """`is_open`: the prompt has opened the reasoning. `ends`: markers that end it too."""
        ...

    def tools(self, names: frozenset[str], num_calls_before: int) -> ToolParser:
        """`names` of the functions on offer; `num_calls_before`: calls earlier in the conversation."""
        ...
