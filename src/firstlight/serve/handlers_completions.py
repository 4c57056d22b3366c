"""POST /v1/completions: texts or token ids in, texts out, one prompt or many.

Registered by `serve.app`. Invariant: choice i of prompt p has the index p * n + i, as clients that send
batches expect.
"""

from __future__ import annotations

import time
from time import monotonic

from msgspec import UNSET

from firstlight.base.errors import RequestError
from firstlight.serve.choice import Delta, TextOptions
from firstlight.serve.exchange import Reply
from firstlight.serve.generation import Generation, Job
from firstlight.serve.prompts import check_length, completion_prompts
from firstlight.serve.protocol import CompletionRequest
from firstlight.serve.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    completion_logprobs,
    encode,
)
from firstlight.serve.sampling import sampling_params
from firstlight.serve.server import Server

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


class CompletionAnswer:
    """One completion request on its way to an answer."""

    def __init__(self, server: Server, request: CompletionRequest, request_id: str) -> None:
        self._server = server
        self._request = request
        self._model = server.check_model(request.model)
        self._arrived_s = monotonic()
        self._created = int(time.time())
        self._id = request_id
        self._max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if request.echo and request.logprobs is not None:
            raise RequestError(
                "echo with logprobs asks for log-probabilities of the prompt, which are not supported yet; "
                "leave one of them out.",
                param="echo",
                code="unsupported_parameter",
            )
        self._params = sampling_params(
            request,
            max_tokens=self._max_tokens,
            logprobs=request.logprobs,
            defaults=server.generation_defaults,
            limits=server.config.server,
            vocab_size=server.ready.vocab_size,
        )
        self._echoes: list[str] = []

    async def run(self, reply: Reply) -> None:
        """Generates and writes the answer."""
        request = self._request
        prompts = await completion_prompts(self._server, request.prompt, request.add_special_tokens)
        check_length(self._server, prompts, self._max_tokens, "prompt")
        if request.echo:
            self._echoes = self._prompt_texts(prompts)
        options = TextOptions(
            skip_special_tokens=request.skip_special_tokens,
            include_stop=request.include_stop_str_in_output,
            after_text=True,
            token_ids=request.return_token_ids,
        )
        job = Job(self._id, prompts, self._params, request.n, options, request.priority, self._arrived_s)
        async with Generation(self._server, job) as generation:
            if request.stream:
                await self._stream(reply, generation, prompts)
            else:
                await reply.json(encode(await self._whole(generation, prompts)))

    def _prompt_texts(self, prompts: list[list[int]]) -> list[str]:
        prompt = self._request.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [
            given if isinstance(given, str) else self._server.text.decode(ids, skip_special_tokens=False)
            for given, ids in zip(prompt if len(prompts) == len(prompt) else prompts, prompts, strict=True)
        ]

    async def _whole(self, generation: Generation, prompts: list[list[int]]) -> Completion:
        deltas: list[list[Delta]] = [[] for _ in generation.choices]
        while not generation.is_finished:
            index, delta = await generation.next()
            deltas[index].append(delta)
        choices = [self._choice(index, _joined(parts), prompts) for index, parts in enumerate(deltas)]
        return Completion(self._id, self._created, self._model, choices, usage=generation.usage())

    def _choice(
        self, index: int, delta: Delta, prompts: list[list[int]], *, first: bool = True
    ) -> CompletionChoice:
        request, number = self._request, index // self._request.n
        logprobs: CompletionLogprobs | None = None
        if request.logprobs is not None:
            logprobs = completion_logprobs(delta.logprobs, delta.offsets, self._server.text)
        echo = self._echoes[number] if self._echoes and first else ""
        return CompletionChoice(
            index,
            echo + delta.text,
            logprobs,
            delta.finish_reason,
            delta.stop_reason,
            prompts[number] if request.return_token_ids and first else UNSET,
            delta.token_ids if request.return_token_ids else UNSET,
        )

    async def _stream(self, reply: Reply, generation: Generation, prompts: list[list[int]]) -> None:
        options = self._request.stream_options
        with_usage = options is not None and options.include_usage
        always_usage = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        while not generation.is_finished:
            index, delta = await generation.next()
            first = index not in begun
            if not delta and not (first and self._echoes):
                continue
            begun.add(index)
            chunk = self._chunk([self._choice(index, delta, prompts, first=first)])
            if always_usage:
                chunk.usage = generation.usage()
            elif with_usage:
                chunk.usage = None
            await reply.event(encode(chunk))
        if with_usage:
            chunk = self._chunk([])
            chunk.usage = generation.usage()
            await reply.event(encode(chunk))
        await reply.done()

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self._id, self._created, self._model, choices)


def _joined(parts: list[Delta]) -> Delta:
    whole = Delta(finish_reason=parts[-1].finish_reason, stop_reason=parts[-1].stop_reason)
    whole.text = "".join(part.text for part in parts)
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs
        whole.offsets += part.offsets
    return whole
