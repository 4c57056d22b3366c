"""The markup of Kimi-K2 and its successors: <think> and sections of tool calls.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:IDX<|tool_call_argument_begin|>{...}
    <|tool_call_end|><|tool_calls_section_end|>

Found by `serve.parsing.registry`. Seen from real models, and read here: the section's tokens in the singular,
calls without a section, without an end, without arguments, ids without "functions." or without a number.
Invariant: no text is lost: what looks like a call and is none stands in the content as it was written, and
only white space around calls and the marks of sections are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from firstlight.serve.parsing.markers import MarkerScanner
from firstlight.serve.parsing.parser import ReasoningParser, ToolCallPiece, ToolParser, ToolText
from firstlight.serve.parsing.thinking import TaggedReasoning

_SECTION_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL_BEGIN, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER = re.compile(r"(?P<prefix>functions\.)?(?P<name>[^\s:]+?)?:?(?P<index>(?<=:)\d{1,9})?")
MAX_HEADER_CHARS = 512  # an id of a call; what is longer is none
_CONTENT, _SECTION, _HEAD, _ARGS = range(4)


class KimiK2:
    """A `ParserFamily`."""

    name = "kimi_k2"
    architectures = frozenset({"kimi_k2"})
    call_begins: tuple[str, ...] = (*_SECTION_BEGINS, _CALL_BEGIN)
    markers: tuple[str, ...] = (
        "<think>",
        "</think>",
        _SECTION_BEGINS[0],
        _SECTION_ENDS[0],
        _CALL_BEGIN,
        _ARGUMENTS,
        _CALL_END,
    )
    thinks_after, thinks_until = "<think>", "</think>"
    thinking_variable = "thinking"

    def reasoning(self, *, is_open: bool, ends: Sequence[str]) -> ReasoningParser:
        return TaggedReasoning(self.thinks_after, self.thinks_until, is_open=is_open, ends=ends)

    def tools(self, names: frozenset[str], num_calls_before: int) -> ToolParser:
        return KimiToolCalls(names, num_calls_before)


class KimiToolCalls:
    """A `ToolParser`. Ids are written as the model is to read them again: functions.NAME:IDX."""

    def __init__(self, names: frozenset[str], num_calls_before: int = 0) -> None:
        self._names = names
        self._next_number = num_calls_before
        self._ids: set[str] = set()
        self._scanner = MarkerScanner((*_SECTION_BEGINS, *_SECTION_ENDS, _CALL_BEGIN, _CALL_END, _ARGUMENTS))
        self._state = _CONTENT
        self._in_section = False
        self._head = ""  # what came since the last marker: of a section or of a call's head
        self._begun_with = ""  # the marker before it, if that is lost where it comes to nothing
        self._blank = ""  # white space that is part of the text only if more comes behind it
        self._has_text = False  # since the last call, or since the beginning
        self._has_arguments = False
        self._num_calls = 0
        self.num_ended = 0

    def push(self, text: str) -> ToolText:
        out = ToolText()
        for piece, marker in self._scanner.push(text):
            self._text(piece, out)
            if marker:
                self._marker(marker, out)
        return out

    def flush(self) -> ToolText:
        out = ToolText()
        self._text(self._scanner.flush(), out)
        if self._state in (_SECTION, _HEAD):
            self._give_up(out)
        if self._num_calls == 0:
            out.content += self._blank
        self._blank = ""
        return out

    def _text(self, text: str, out: ToolText) -> None:
        if not text:
            return
        if self._state == _CONTENT:
            self._say(text, out)
        elif self._state == _ARGS:
            self._argue(text, out)
        else:
            room = MAX_HEADER_CHARS - len(self._head)
            self._head += text[:room]
            if len(text) > room:
                self._give_up(out)
                self._text(text[room:], out)

    def _marker(self, marker: str, out: ToolText) -> None:
        if marker == _ARGUMENTS and self._state in (_SECTION, _HEAD):
            self._begin_call(marker, out)
        elif marker == _CALL_END and self._state == _HEAD:
            self._begin_call(marker, out)
            if self._state == _ARGS:
                self._end_call(out)
        elif self._state == _ARGS and marker != _ARGUMENTS:
            self._end_call(out)
            if marker != _CALL_END:
                self._marker(marker, out)
        elif marker in KimiK2.call_begins:
            self._give_up(out)
            self._in_section = self._in_section or marker != _CALL_BEGIN
            self._state = _HEAD if marker == _CALL_BEGIN else _SECTION
            self._begun_with = marker if marker == _CALL_BEGIN else ""
        elif marker in _SECTION_ENDS:
            self._give_up(out)
            self._in_section, self._state = False, _CONTENT
        elif marker != _CALL_END or self._state == _CONTENT:
            self._text(marker, out)

    def _begin_call(self, marker: str, out: ToolText) -> None:
        """The head is complete; where it names no function, it was none, nor was what it ends with."""
        name, number = self._function(self._head.strip())
        if name is None:
            self._head += marker
            self._give_up(out)
            return
        call_id = self._new_id(name, number)
        out.calls.append(ToolCallPiece(self._num_calls, call_id, name))
        self._num_calls += 1
        self._state, self._has_arguments, self._blank = _ARGS, False, ""
        self._head = self._begun_with = ""

    def _function(self, head: str) -> tuple[str | None, int | None]:
        """The function's name and the call's number, as far as the head says them."""
        found = _HEADER.fullmatch(head) if head else None
        if found is None:
            return None, None
        name, index = found["name"], found["index"]
        number = None if index is None else int(index)
        is_bare = name is None or name.isdecimal() or name == "functions"
        if name in self._names or (not is_bare and (found["prefix"] or index)):
            return name, number
        if len(self._names) == 1:  # only a number, or an id in the style of another model
            return next(iter(self._names)), int(name) if name and name.isdecimal() else number
        return None, None

    def _new_id(self, name: str, number: int | None) -> str:
        """Unique in the answer, whatever the model counted."""
        number = self._next_number if number is None else number
        while (call_id := f"functions.{name}:{number}") in self._ids:
            number += 1
        self._ids.add(call_id)
        self._next_number = number + 1
        return call_id

    def _end_call(self, out: ToolText) -> None:
        if not self._has_arguments:
            self._add_arguments("{}", out)
        self._blank, self._has_text = "", False
        self.num_ended += 1
        self._state = _SECTION if self._in_section else _CONTENT

    def _argue(self, text: str, out: ToolText) -> None:
        """White space around the arguments is left out."""
        text = self._blank + text if self._has_arguments else text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._has_arguments = True
            self._add_arguments(shown, out)

    def _add_arguments(self, text: str, out: ToolText) -> None:
        index = self._num_calls - 1
        if not out.calls or out.calls[-1].index != index:
            out.calls.append(ToolCallPiece(index))
        out.calls[-1].arguments += text

    def _say(self, text: str, out: ToolText) -> None:
        """Content; blanks wait, as they are left out before and behind calls if there is nothing else."""
        if not self._has_text:
            if text.isspace():
                self._blank += text
                return
            text, self._blank, self._has_text = self._blank + text, "", True
        out.content += text

    def _give_up(self, out: ToolText) -> None:
        """What was collected as a head is content. The state is that before it began."""
        text, self._head, self._begun_with = self._begun_with + self._head, "", ""
        if self._state in (_SECTION, _HEAD):
            self._state = _SECTION if self._in_section else _CONTENT
        if text and not text.isspace():
            self._say(text, out)
