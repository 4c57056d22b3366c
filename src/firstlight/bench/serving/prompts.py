"""Prompts for load: synthetic ones of a fixed length, or those of a JSONL file.

Invariant: the same seed gives the same prompts, and two synthetic prompts share nothing but the prefix that
was asked for, so that a prefix cache helps only where it is meant to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.base.errors import UsageError, why_unreadable

_EXPECTED = 'Each line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'

# Words that are one token with a leading space in the usual vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name president team "
    "minute idea body back parent face level office door health person art war history party result "
    "change morning reason research girl guy moment air teacher force education foot boy age policy music "
    "market sense nation plan college interest death experience effect use class control field "
    "development role effort rate heart drug show leader light voice"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, kw_only=True)
class SyntheticPrompts:
    """Random token ids of `[first_id, end_id)`, or as many random words where an api takes text only."""

    num_tokens: int
    num_shared: int = 0  # of the first ones, the same in every prompt
    first_id: int = 1_000
    end_id: int = 20_000

    def make(self, count: int, seed: int, *, as_text: bool) -> list[str] | list[list[int]]:
        """`count` prompts."""
        shared, own = random.Random(0), random.Random(seed)
        num_own = self.num_tokens - self.num_shared
        if as_text:
            prefix = shared.choices(WORDS, k=self.num_shared)
            return [" ".join(prefix + own.choices(WORDS, k=num_own)) for _ in range(count)]
        ids = range(self.first_id, self.end_id)
        first = shared.choices(ids, k=self.num_shared)
        return [first + own.choices(ids, k=num_own) for _ in range(count)]


def synthetic_requests(prompts: SyntheticPrompts, api: str, count: int, seed: int) -> list[dict[str, Any]]:
    """The part of each request that holds its prompt."""
    made = prompts.make(count, seed, as_text=api == "chat")
    if api == "chat":
        return [{"messages": [{"role": "user", "content": text}]} for text in made]
    return [{"prompt": prompt} for prompt in made]


def read_requests(path: Path, api: str) -> list[dict[str, Any]]:
    """The requests of a JSONL file, a JSON object a line.

    Each has "prompt" (text or token ids) or "messages"; other fields ("max_tokens", ...) are sent as they
    are. For chat a text prompt becomes a message of the user. Raises `UsageError` with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the prompts in {path}: {why_unreadable(error)}",
            "Check the path given with --prompts.",
        ) from error
    requests = [
        _request(line, f"{path}:{number}", api) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not requests:
        raise UsageError(f"{path} holds no prompt.", 'Write one JSON object a line: {"prompt": "..."}')
    return requests


def _request(line: str, place: str, api: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}", _EXPECTED) from error
    if not isinstance(request, dict) or not ("prompt" in request) ^ ("messages" in request):
        raise UsageError(f"{place} must be an object with either prompt or messages.", _EXPECTED)
    if api == "completions" and "messages" in request:
        raise UsageError(f"{place} has messages, which /v1/completions does not take.", "Add --api chat.")
    if api == "chat" and "prompt" in request:
        text = request.pop("prompt")
        if not isinstance(text, str):
            raise UsageError(
                f"{place} has a prompt of token ids, which chat does not take.", "Use --api completions."
            )
        request["messages"] = [{"role": "user", "content": text}]
    return request


def repeated(requests: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` requests, from the beginning again where there are too few."""
    return [requests[index % len(requests)] for index in range(count)]
