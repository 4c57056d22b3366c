"""Requests and streamed answers of the OpenAI completion APIs, as a load generator needs them.

Works with any such server. Invariant: whatever a server sends, the result is a record or an error text, never
an exception.
"""

from __future__ import annotations

from typing import Any

import msgspec

from firstlight.bench.measures import RequestRecord
from firstlight.bench.serving.http_client import Reply

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DONE = b"[DONE]"

Events = list[tuple[float, bytes]]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        part = self.delta or self.message
        return bool(self.text or (part and (part.content or part.reasoning_content)))


class Event(msgspec.Struct):
    """A chunk of a streamed answer, or a whole answer that was not streamed."""

    id: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(choice.has_text for choice in self.choices)

    @property
    def has_end(self) -> bool:
        return any(choice.finish_reason for choice in self.choices)


_decoder = msgspec.json.Decoder(Event)


def decode_event(data: bytes) -> Event:
    """Raises `msgspec.DecodeError`; unknown fields are passed over."""
    return _decoder.decode(data)


def record_of(started_s: float, sent_s: float, reply: Reply, events: Events, now_s: float) -> RequestRecord:
    """What a finished exchange amounts to. `now_s` is when it was over."""
    if reply.status != 200:
        return failed(started_s, now_s, error_text(reply))
    text_times_s: list[float] = []
    ended_s, usage, num_ends = now_s, None, 0
    for time_s, data in events:
        if data == DONE:
            continue
        try:
            event = decode_event(data)
        except msgspec.DecodeError:
            return failed(started_s, now_s, f"not a chunk of an answer: {data[:80]!r}")
        if event.error is not None:
            return failed(started_s, now_s, f"broke off: {_message(event.error)}")
        if event.has_text:
            text_times_s.append(time_s)
        if event.has_end:
            ended_s, num_ends = time_s, num_ends + 1
        usage = event.usage or usage
    if not num_ends:
        return failed(started_s, now_s, "the stream ended without a finish reason")
    counts = usage or Usage(completion_tokens=len(text_times_s))
    return RequestRecord(
        started_s=started_s,
        ended_s=ended_s,
        text_times_s=tuple(text_times_s),
        num_prompt_tokens=counts.prompt_tokens,
        num_cached_tokens=counts.cached_tokens,
        num_output_tokens=counts.completion_tokens,
        has_usage=usage is not None,
        late_s=sent_s - started_s,
    )


def failed(started_s: float, now_s: float, error: str) -> RequestRecord:
    """The record of a request that gave no answer."""
    return RequestRecord(started_s=started_s, ended_s=now_s, error=error)


def error_text(reply: Reply) -> str:
    """Status and message of an OpenAI-shaped error, or the beginning of whatever came instead."""
    try:
        message = _message(decode_event(bytes(reply.body)).error)
    except msgspec.DecodeError:
        message = bytes(reply.body[:200]).decode(errors="replace")
    return f"{reply.status}: {message}"


def _message(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
