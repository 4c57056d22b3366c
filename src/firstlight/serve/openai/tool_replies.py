"""Tool calls in OpenAI's shapes: whole ones in a message, pieces of them in a stream's deltas.

Invariant: the deltas of a call, joined, are the call.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from firstlight.serve.parsing.parser import ToolCallPiece


class Function(msgspec.Struct):
    """What is called. `arguments` is text, JSON if the model wrote JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call in an answer."""

    id: str
    function: Function
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    """A piece of one."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """A piece of a call; the first one has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


def whole_calls(pieces: Iterable[ToolCallPiece]) -> list[ToolCall]:
    """The calls that the pieces make."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(ToolCall(piece.id, Function(piece.name or "", "")))
        calls[piece.index].function.arguments += piece.arguments
    return calls


def call_deltas(pieces: Iterable[ToolCallPiece]) -> list[ToolCallDelta]:
    """The pieces as they go into a chunk."""
    return [
        ToolCallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
        if piece.id is None
        else ToolCallDelta(
            piece.index, FunctionDelta(piece.name or "", piece.arguments), piece.id, "function"
        )
        for piece in pieces
    ]
