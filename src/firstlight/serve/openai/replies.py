"""The answers: msgspec structs in OpenAI's shapes, encoded once a chunk on the hot path.

Fields that a client must be able to tell absent from null use `UNSET`. Invariant: a field of OpenAI's shape
is always present; fields of our own are present only when they were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from firstlight.engine.messages import TokenLogprobs
from firstlight.serve.openai.tool_replies import ToolCall, ToolCallDelta
from firstlight.text.model import TextModel

MINUS_INFINITY = -9999.0  # JSON has no infinity; the value that OpenAI's API uses
encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Tokens that a drafter had guessed: those of the answer, and those that the model did not choose;
    and tokens of the answer that are reasoning."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of the answer, and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of an answer or of a chunk of it."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The older shape: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(msgspec.Struct):
    """The answer."""

    role: str
    content: str | None  # null: there are only tool calls
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A chunk of one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One answer, or a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer to a completion request, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    object: str = "model"


class ModelList(msgspec.Struct):
    """GET /v1/models"""

    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct):
    """The answer of /v1/tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The answer of /v1/detokenize."""

    prompt: str


class Version(msgspec.Struct):
    """The answer of /version, as vLLM has it."""

    version: str


class TokenizerInfo(msgspec.Struct):
    """The answer of /tokenizer_info: what of a tokenizer_config.json a client can use, as vLLM has it."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Aborted(msgspec.Struct):
    """The answer of DELETE /v1/requests/{id}."""

    id: str
    aborted: bool = True
    object: str = "request"


def chat_logprobs(items: Sequence[TokenLogprobs], text: TextModel) -> ChatLogprobs:
    """The chat shape of the engine's log-probabilities."""
    content: list[ChatLogprob] = []
    for item in items:
        raw = text.token_bytes(item.token_id)
        top = [
            TopLogprob(text.token_text(token), finite(value), list(text.token_bytes(token)))
            for token, value in item.top
        ]
        content.append(ChatLogprob(text.token_text(item.token_id), finite(item.logprob), list(raw), top))
    return ChatLogprobs(content)


def completion_logprobs(
    items: Sequence[TokenLogprobs], offsets: Sequence[int], text: TextModel
) -> CompletionLogprobs:
    """The older shape; the sampled token is always among its top ones."""
    tops: list[dict[str, float]] = []
    for item in items:
        top = {_legacy_text(token, text): finite(value) for token, value in reversed(item.top)}
        top.setdefault(_legacy_text(item.token_id, text), finite(item.logprob))
        tops.append(top)
    return CompletionLogprobs(
        list(offsets),
        [finite(item.logprob) for item in items],
        [_legacy_text(item.token_id, text) for item in items],
        tops,
    )


def _legacy_text(token_id: int, text: TextModel) -> str:
    """A token as the older shape names it: it has no list of bytes, so parts of characters are marked."""
    try:
        return text.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return f"bytes:{text.token_text(token_id)}"


def startup_event(startup: dict[str, Any]) -> str:
    """A start that is over as server-sent events: one, with what became of it ("ready" or "lost")."""
    return f"event: {startup['status']}\ndata: {encode(startup).decode()}\n\n"


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    return value if math.isfinite(value) else MINUS_INFINITY
