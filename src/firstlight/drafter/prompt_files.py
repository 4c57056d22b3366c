"""Prompts from files: JSON lines, or a JSON array, of texts, OpenAI messages or ShareGPT conversations.

Called by `prompts`. A conversation is cut behind its last message of a user or a tool: the target gives the
answer anew. Calls of tools, their definitions, and reasoning stay as they are. Invariant: every record is
understood, or an error names its file and number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
_ASKING = ("user", "tool")  # roles whose message the target answers
_FORMS = (
    'Give {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}.'
)


@dataclass(frozen=True)
class Conversation:
    """What the target is to answer: messages, and the definitions of the tools that it may call."""

    messages: Messages
    tools: Messages = field(default_factory=list)


def read_prompt_file(path: Path) -> list[Conversation]:
    """The conversations of a file, each ending with a question. Raises `ModelFileError`."""
    found = []
    for number, record in enumerate(_records(path), 1):
        messages = _messages(record)
        if not messages:
            raise ModelFileError(f"{path}, record {number} is {_shown(record)}, and no conversation.", _FORMS)
        roles = sorted({str(message.get("role")) for message in messages})
        while messages and messages[-1].get("role") not in _ASKING:
            messages.pop()
        if not messages:
            raise ModelFileError(
                f"{path}, record {number}: there is no user message in it, only {', '.join(roles)}.", _FORMS
            )
        asked = messages[-1].get("content")
        if messages[-1]["role"] == "user" and not (asked.strip() if isinstance(asked, str) else asked):
            raise ModelFileError(f"{path}, record {number}: its question is empty.", "Remove this record.")
        found.append(Conversation(messages, _tools(record)))
    if not found:
        raise ModelFileError(f"{path} has no prompts in it.", _FORMS)
    return found


def _records(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {why_unreadable(error)}.", "Check the path; it must be UTF-8."
        ) from error
    rows = [text] if text.lstrip().startswith("[") else [row for row in text.splitlines() if row.strip()]
    records: list[Any] = []
    for number, row in enumerate(rows, 1):
        try:
            value = msgspec.json.decode(row)
        except msgspec.DecodeError as error:
            raise ModelFileError(f"{path}, line {number}: {error}.", _FORMS) from error
        records += value if isinstance(value, list) and len(rows) == 1 else [value]
    return records


def _shown(record: Any) -> str:
    """A record that is not understood, in a few characters."""
    return msgspec.json.encode(record).decode()[:60]


def _tools(record: Any) -> Messages:
    """The definitions of tools; some files have them as JSON in a text."""
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools)
        except msgspec.DecodeError:
            tools = None
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def _messages(record: Any) -> Messages:
    if isinstance(record, str):
        return [{"role": "user", "content": record}]
    if not isinstance(record, dict):
        return []
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    if isinstance(record.get("messages"), list):
        return [dict(message) for message in record["messages"] if isinstance(message, dict)]
    turns = record.get("conversations")
    if isinstance(turns, list):
        return [
            {"role": _ROLES.get(str(turn.get("from"))), "content": turn.get("value")}
            for turn in turns
            if isinstance(turn, dict)
        ]
    return []
