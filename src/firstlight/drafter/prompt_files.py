"""Prompts from files: JSON lines, or a JSON array, of texts, OpenAI messages or ShareGPT conversations.

A conversation is cut behind its last message of a user or a tool: the target gives the answer anew. Calls of
tools, their definitions, and reasoning stay as they are. Invariant: every record is understood whole, or an
error names its file, line and number; where bad ones may be skipped they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from firstlight.base.errors import ModelFileError, why_unreadable

Messages = list[dict[str, Any]]
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_SPEAKERS = {*_ROLES.values(), "developer", "function"}
_ASKING = ("user", "tool")  # roles whose message the target answers
_FORMS = (
    'Give {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}.'
)
_SKIP = "leave such records out with --skip-bad."


@dataclass(frozen=True)
class Conversation:
    """What the target is to answer: messages, and the definitions of the tools that it may call.

    `where`: file, line and number of its record, for messages.
    """

    messages: Messages
    tools: Messages = field(default_factory=list)
    where: str = ""


OnBad = Callable[[ModelFileError], None]


def read_prompt_file(path: Path, on_bad: OnBad | None = None) -> list[Conversation]:
    """The conversations of a file, each ending with a question.

    Raises `ModelFileError` for the first record that is not understood; with `on_bad` that hears of each such
    record instead, and the others are kept.
    """
    found = []
    for where, record in _records(path, on_bad):
        try:
            found.append(_conversation(record, where))
        except ModelFileError as error:
            if on_bad is None:
                raise
            on_bad(error)
    if not found:
        raise ModelFileError(f"{path} has no prompts in it{' that can be used' if on_bad else ''}.", _FORMS)
    return found


def _conversation(record: Any, where: str) -> Conversation:
    messages = _messages(record, where)
    if not messages:
        raise ModelFileError(f"{where} is {_shown(record)}, and no conversation.", _FORMS)
    roles = sorted({str(message.get("role")) for message in messages})
    while messages and messages[-1].get("role") not in _ASKING:
        messages.pop()
    if not messages:
        raise ModelFileError(f"{where}: there is no user message in it, only {', '.join(roles)}.", _FORMS)
    for number, message in enumerate(messages, 1):
        _check(message, f"{where}, message {number}")
    asked = messages[-1].get("content")
    if messages[-1]["role"] == "user" and not (asked.strip() if isinstance(asked, str) else asked):
        raise ModelFileError(f"{where}: its question is empty.", f"Remove this record, or {_SKIP}")
    return Conversation(messages, _tools(record, where), where)


def _check(message: dict[str, Any], where: str) -> None:
    """What a chat template would stumble over."""
    role, content = message.get("role"), message.get("content")
    if role not in _SPEAKERS:
        _refuse(where, f"its role is {_shown(role)}, not one of {', '.join(sorted(_SPEAKERS))}")
    parts = content if isinstance(content, list) else [content or ""]
    if not all(isinstance(part, str | dict) for part in parts) or isinstance(content, dict):
        _refuse(where, f"its content is {_shown(content)}, neither text nor a list of parts")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(c, dict) for c in calls)):
        _refuse(where, f"its tool_calls are {_shown(calls)}, no list of objects")


def _refuse(where: str, why: str) -> NoReturn:
    raise ModelFileError(f"{where}: {why}.", f"Mend this record, or {_SKIP}")


def _records(path: Path, on_bad: OnBad | None) -> list[tuple[str, Any]]:
    """Each record, and where it stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {why_unreadable(error)}.", "Check the path; it must be UTF-8."
        ) from error
    if text.lstrip().startswith("["):
        try:
            values = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ModelFileError(f"{path}, line 1: {error}.", _FORMS) from error
        return [(f"{path}, record {number}", value) for number, value in enumerate(values, 1)]
    records: list[tuple[str, Any]] = []
    rows = [(line, row) for line, row in enumerate(text.split("\n"), 1) if row.strip()]
    for number, (line, row) in enumerate(rows, 1):
        try:
            records.append((f"{path}, line {line}, record {number}", msgspec.json.decode(row)))
        except msgspec.DecodeError as error:
            bad = ModelFileError(f"{path}, line {line}: {error}.", _FORMS)
            if on_bad is None:
                raise bad from error
            on_bad(bad)
    return records


def _shown(record: Any) -> str:
    """A record that is not understood, in a few characters."""
    return msgspec.json.encode(record).decode()[:60]


def _tools(record: Any, where: str) -> Messages:
    """The definitions of tools; some files have them as JSON in a text."""
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(tools, str) and tools.strip():
        try:
            tools = msgspec.json.decode(tools)
        except msgspec.DecodeError:
            _refuse(where, f"its tools are {_shown(tools)}, which is no JSON")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _refuse(where, f"its tools are {_shown(tools)}, no list of definitions")
    return tools


def _messages(record: Any, where: str) -> Messages:
    if isinstance(record, str):
        return [{"role": "user", "content": record}]
    if not isinstance(record, dict):
        return []
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    for name in ("messages", "conversations"):
        turns = record.get(name)
        if turns is None:
            continue
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            _refuse(where, f"its {name} are {_shown(turns)}, no list of objects")
        if name == "messages":
            return [dict(turn) for turn in turns]
        spoken = [_of_sharegpt(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]
        system = record.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *spoken]
    return []


def _of_sharegpt(turn: dict[str, Any], where: str) -> dict[str, Any]:
    """A turn of a ShareGPT file as a message; some have OpenAI's names in it."""
    who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(who, str) or who not in _ROLES:
        _refuse(where, f'its speaker is "from": {_shown(who)}, not one of {", ".join(sorted(_ROLES))}')
    if not isinstance(said, str):
        _refuse(where, f"its value is {_shown(said)}, no text")
    return {"role": _ROLES[who], "content": said}
