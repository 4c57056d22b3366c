"""Prompts in, answers out, as JSON lines: the files of `firstlight run`.

Invariant: a line that cannot be used is an error that names its number, found before any model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from firstlight.base.errors import UsageError, is_text

_EXPECTED = 'Each line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'


@dataclass(frozen=True)
class Prompt:
    """One thing to answer: text, or the messages of a chat. `id` comes back with the answer."""

    id: Any
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_prompts(lines: Iterable[str], origin: str) -> list[Prompt]:
    """The prompts in the lines of `origin`; empty lines are passed over; an absent id is the line."""
    prompts = [
        _prompt(line, f"line {number} of {origin}", number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise UsageError(f"{origin} holds no prompt.", _EXPECTED)
    return prompts


def answer_line(prompt: Prompt, fields: dict[str, Any]) -> str:
    """One line of JSON: the prompt's id and what was answered."""
    return json.dumps({"id": prompt.id, **fields}, ensure_ascii=False) + "\n"


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.", _EXPECTED) from error
    if not isinstance(content, dict):
        raise UsageError(f"{where} is not a JSON object.", _EXPECTED)
    unknown = content.keys() - {"id", "prompt", "messages"}
    if unknown:
        raise UsageError(f"{where} has unknown keys: {', '.join(sorted(unknown))}.", _EXPECTED)
    if not is_text(json.dumps(content, ensure_ascii=False)):
        raise UsageError(f"{where} has half of a surrogate pair, which is no text.", _EXPECTED)
    text, messages = content.get("prompt"), content.get("messages")
    if (text is None) == (messages is None):
        raise UsageError(f"{where} must have either a prompt or messages.", _EXPECTED)
    if text is not None and not isinstance(text, str):
        raise UsageError(f"the prompt in {where} is not text.", _EXPECTED)
    if messages is not None and not _are_messages(messages):
        raise UsageError(f"the messages in {where} are not a list of objects with a role.", _EXPECTED)
    return Prompt(content.get("id", number), text, messages)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)
