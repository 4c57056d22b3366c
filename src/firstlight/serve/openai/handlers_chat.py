"""POST /v1/chat/completions.

Invariant: a stream, joined, is the answer that the same request gives without `stream`.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET

from firstlight.base.errors import RequestError
from firstlight.engine.messages import FINISH_STOP
from firstlight.serve.http.streaming_response import Reply
from firstlight.serve.openai.chat_turn import answer_parser, chat_prompt
from firstlight.serve.openai.choice import Delta
from firstlight.serve.openai.completion import Head, StreamUsage
from firstlight.serve.openai.generation import Generation
from firstlight.serve.openai.prompts import check_prompts
from firstlight.serve.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    MessageDelta,
    chat_logprobs,
    encode,
)
from firstlight.serve.openai.requests import ChatRequest
from firstlight.serve.openai.sampling import sampling_params
from firstlight.serve.openai.tool_replies import call_deltas, whole_calls
from firstlight.serve.server import Server

FINISH_TOOL_CALLS = "tool_calls"


class ChatAnswer:
    """One chat request on its way to an answer."""

    def __init__(self, server: Server, request: ChatRequest, request_id: str) -> None:
        self._server = server
        self._request = request
        self._head = Head(request_id, server.check_model(request.model))
        self._max_tokens = _max_tokens(request)
        self._params = sampling_params(
            request,
            max_tokens=self._max_tokens,
            logprobs=_num_logprobs(request),
            defaults=server.generation_defaults,
            limits=server.config.server,
            vocab_size=server.ready.vocab_size,
        )

    async def run(self, reply: Reply) -> None:
        """Generates and writes the answer."""
        request = self._request
        chat = await chat_prompt(self._server, request, request.messages)
        prompt = chat.token_ids
        limit_param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        check_prompts(self._server, [prompt], self._max_tokens, "messages", limit_param)
        job = self._head.job(request, [prompt], self._params, request.continue_final_message)
        job = replace(job, parser=lambda: answer_parser(self._server, chat, one_call=self._is_single))
        async with Generation(self._server, job) as generation:
            if request.stream:
                await self._stream(reply, generation, prompt)
            else:
                await reply.json(encode(await self._whole(generation, prompt)))

    async def _whole(self, generation: Generation, prompt: list[int]) -> ChatCompletion:
        deltas = await generation.whole()
        return ChatCompletion(
            self._head.id,
            self._head.created,
            self._head.model,
            [self._choice(index, parts, generation) for index, parts in enumerate(deltas)],
            generation.usage(),
            prompt_token_ids=prompt if self._request.return_token_ids else UNSET,
        )

    @property
    def _is_single(self) -> bool:
        return not self._request.parallel_tool_calls

    def _choice(self, index: int, parts: list[Delta], generation: Generation) -> ChatChoice:
        last = parts[-1]
        logprobs = [item for part in parts for item in part.logprobs]
        tokens = [token for part in parts for token in part.token_ids]
        return ChatChoice(
            index,
            self._message(parts),
            chat_logprobs(logprobs, self._server.text) if self._request.logprobs else None,
            _why(last, generation.choices[index].has_calls),
            last.stop_reason,
            tokens if self._request.return_token_ids else UNSET,
        )

    def _message(self, parts: list[Delta]) -> AssistantMessage:
        content = "".join(part.text for part in parts)
        reasoning = "".join(part.reasoning for part in parts) if self._request.include_reasoning else ""
        calls = whole_calls(piece for part in parts for piece in part.calls)
        return AssistantMessage(
            "assistant",
            content or (None if calls else ""),
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    async def _stream(self, reply: Reply, generation: Generation, prompt: list[int]) -> None:
        usage = StreamUsage(self._request, generation)
        begun = False
        while not generation.is_finished:
            index, delta = await generation.next()
            if not begun:  # only now is it sure that the request was not rejected
                begun = True
                await self._begin(reply, prompt, usage)
            if not self._request.include_reasoning:
                delta.reasoning = ""
            if delta:
                has_calls = generation.choices[index].has_calls
                choice = self._chunk_choice(index, delta, has_calls)
                await reply.event(encode(self._chunk([choice], usage)))
        await usage.end(reply, self._chunk([], usage))

    async def _begin(self, reply: Reply, prompt: list[int], usage: StreamUsage) -> None:
        for index in range(self._request.n):
            choice = ChatChunkChoice(index, MessageDelta(role="assistant", content=""))
            chunk = self._chunk([choice], usage)
            if self._request.return_token_ids and index == 0:
                chunk.prompt_token_ids = prompt
            await reply.event(encode(chunk))

    def _chunk_choice(self, index: int, delta: Delta, has_calls: bool) -> ChatChunkChoice:
        logprobs: ChatLogprobs | None = None
        if self._request.logprobs and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._server.text)
        return ChatChunkChoice(
            index,
            self._delta(delta),
            logprobs,
            _why(delta, has_calls),
            delta.stop_reason if delta.finish_reason else UNSET,
            delta.token_ids if self._request.return_token_ids else UNSET,
        )

    def _delta(self, delta: Delta) -> MessageDelta:
        return MessageDelta(
            content=delta.text or UNSET,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=call_deltas(delta.calls) or UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: StreamUsage) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, choices, usage=usage.so_far())


def _why(delta: Delta, has_calls: bool) -> str | None:
    """Why the answer ended, as OpenAI says it: an answer that ended by itself and calls tools, for these."""
    if delta.finish_reason == FINISH_STOP and delta.stop_reason is None and has_calls:
        return FINISH_TOOL_CALLS
    return delta.finish_reason


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true; set it.", param="top_logprobs")
        return None
    return request.top_logprobs or 0
