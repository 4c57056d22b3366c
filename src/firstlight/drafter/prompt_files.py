"""Prompts from files: JSON lines, or a JSON array, of texts, OpenAI messages or ShareGPT conversations.

Called by `prompts`. A conversation is cut behind its last user message: the target gives the answer anew.
Invariant: every record is understood, or an error names its file and number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError, why_unreadable

Messages = list[dict[str, Any]]
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = (
    'Give {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}.'
)


def read_prompt_file(path: Path) -> list[Messages]:
    """The conversations of a file, each ending with a user message. Raises `ModelFileError`."""
    found = []
    for number, record in enumerate(_records(path), 1):
        messages = _messages(record)
        while messages and messages[-1].get("role") != "user":
            messages.pop()
        if not messages:
            raise ModelFileError(f"{path}, record {number}: there is no user message in it.", _FORMS)
        found.append(messages)
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
