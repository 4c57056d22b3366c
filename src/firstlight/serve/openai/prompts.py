"""From a request's prompt to token ids that the engine can take.

Long texts are tokenised in a thread, so that other streams go on. Invariant: prompts that leave here are not
empty, fit into the model, and hold only ids that the model knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from firstlight.base.errors import RequestError
from firstlight.serve.server import Server

INLINE_CHARS = 4096  # a shorter text is tokenised in less time than a thread takes to begin
HEAD_CHARS_PER_TOKEN = 16  # more than texts have, so that only hopeless ones are cut
# Also in the text: LangChain looks for it there, and openai's exceptions show only the text since 3.0.
_TOO_LONG = "context_length_exceeded"
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


async def chat_tokens(
    server: Server, messages: Sequence[Mapping[str, Any]], flags: Mapping[str, Any], add_special_tokens: bool
) -> tuple[str, list[int]]:
    """A conversation's prompt and its token ids. `flags`: the other arguments of `TextModel.render_chat`."""

    def render() -> str:
        return server.text.render_chat(messages, **flags)

    def encode(prompt: str) -> tuple[str, list[int]]:
        # Templates write the begin token themselves.
        return prompt, _encode(server, prompt, add_special_tokens, "messages")

    is_plain = not flags["tools"] and not any("tool_calls" in message for message in messages)
    num_chars = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))
    loop = asyncio.get_running_loop()
    if not is_plain or num_chars >= INLINE_CHARS or len(messages) >= 64:
        return await loop.run_in_executor(_threads, lambda: encode(render()))
    prompt = render()
    if type(prompt) is str:
        return encode(prompt)
    # Control tokens that a user wrote: for a large vocabulary, the first time takes seconds.
    return await loop.run_in_executor(_threads, encode, prompt)


async def tokenize(server: Server, texts: Sequence[str], add_special_tokens: bool | None) -> list[list[int]]:
    """The token ids of texts."""
    adds = add_special_tokens is not False

    def make() -> list[list[int]]:
        return [_encode(server, text, adds, "prompt") for text in texts]

    if sum(map(len, texts)) < INLINE_CHARS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_threads, make)


async def completion_prompts(
    server: Server, prompt: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool | None
) -> list[list[int]]:
    """The token ids of a completion's prompt or prompts, and for texts none that is empty."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else list(prompt)
    limit = server.config.server.max_batch_prompts
    if len(prompts) > limit:
        raise RequestError(
            f"There are {len(prompts)} prompts; this server takes at most {limit} in a request "
            "(--max-batch-prompts). Send several requests.",
            param="prompt",
        )
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty; send at least one character or token id.", param="prompt")
    if isinstance(prompts[0], str):
        return await tokenize(server, prompts, add_special_tokens)
    return prompts


def check_ids(server: Server, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Refuses ids that the model does not know."""
    size = server.ready.vocab_size
    for ids in prompts:
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise RequestError(
                f"{param} holds the token id {wrong}; the model knows 0 to {size - 1}.", param=param
            )


def check_prompts(
    server: Server,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    param: str,
    limit_param: str = "max_tokens",
) -> None:
    """Refuses what cannot fit into the model's length, with both numbers, and ids that it does not know.

    Ids of a text too: some tokenizers have tokens that were added and that the model was not resized for.
    `param` and `limit_param` are the names under which the client sent prompt and `max_tokens`.
    """
    limit = server.ready.max_model_len
    longest = max(map(len, prompts))
    if not longest:
        raise RequestError("The prompt has no tokens; send some text.", param=param)
    if longest >= limit:
        raise _too_long(limit, f"your {param} resulted in {longest} tokens", param)
    if max_tokens is not None and longest + max_tokens > limit:
        asked = f"{longest} in the {param}, {max_tokens} in the completion"
        raise RequestError(
            f"{_maximum(limit)} However, you requested {longest + max_tokens} tokens ({asked}). Please "
            f"reduce the length of the {param} or completion: lower {limit_param} to {limit - longest}. "
            f"({_TOO_LONG})",
            param=limit_param,
            code=_TOO_LONG,
        )
    check_ids(server, prompts, param)


def _maximum(limit: int) -> str:
    """In OpenAI's words, which clients look for."""
    return f"This model's maximum context length is {limit} tokens."


def _too_long(limit: int, result: str, param: str) -> RequestError:
    return RequestError(
        f"{_maximum(limit)} However, {result}. Please reduce the length of the {param}: prompt and answer "
        f"together have to fit. ({_TOO_LONG})",
        param=param,
        code=_TOO_LONG,
    )


def _encode(server: Server, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids; a text that is far too long is refused by its beginning, which costs little."""
    limit = server.ready.max_model_len
    head_chars = limit * HEAD_CHARS_PER_TOKEN
    if len(text) > head_chars:
        at_least = len(server.text.encode(text[:head_chars], add_special_tokens=add_special_tokens))
        if at_least > limit + limit // 8:  # the cut itself may make a few tokens more
            raise _too_long(
                limit,
                f"your {param} resulted in far more than {at_least} tokens, as it has {len(text)} characters",
                param,
            )
    return server.text.encode(text, add_special_tokens=add_special_tokens)


def _is_ids(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
