"""POST /v1/completions: texts or token ids in, texts out, one prompt or many.

Invariant: choice i of prompt p has the index p * n + i, as clients that send batches expect.
"""

from __future__ import annotations

from msgspec import UNSET

from firstlight.base.errors import RequestError
from firstlight.serve.http.streaming_response import Reply
from firstlight.serve.openai.choice import Delta
from firstlight.serve.openai.completion import Head, StreamUsage
from firstlight.serve.openai.generation import Generation, NoGeneration
from firstlight.serve.openai.prompts import check_prompts, completion_prompts
from firstlight.serve.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    completion_logprobs,
    encode,
)
from firstlight.serve.openai.requests import CompletionRequest
from firstlight.serve.openai.sampling import sampling_params
from firstlight.serve.server import Server

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


class CompletionAnswer:
    """One completion request on its way to an answer."""

    def __init__(self, server: Server, request: CompletionRequest, request_id: str) -> None:
        self._server = server
        self._request = request
        self._head = Head(request_id, server.check_model(request.model))
        self._max_tokens = request.max_tokens
        if self._max_tokens is None:  # fewer where the model's length ends before, and as many as must be
            self._max_tokens = max(DEFAULT_MAX_TOKENS, request.min_tokens)
        if request.echo and request.logprobs is not None:
            raise RequestError(
                "echo with logprobs asks for log-probabilities of the prompt, which are not supported yet; "
                "leave one of them out.",
                param="echo",
                code="unsupported_parameter",
            )
        if self._max_tokens == 0:
            _check_echo_only(request)
        self._params = sampling_params(
            request,
            max_tokens=self._max_tokens or None,
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
        check_prompts(self._server, prompts, request.max_tokens, "prompt")
        if request.echo:
            self._echoes = self._prompt_texts(prompts)
        job = self._head.job(request, prompts, self._params, after_text=True)
        work = Generation(self._server, job) if self._max_tokens else NoGeneration(job)
        async with work as generation:
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

    async def _whole(self, generation: Generation | NoGeneration, prompts: list[list[int]]) -> Completion:
        deltas = await generation.whole()
        choices = [self._choice(index, _joined(parts), prompts) for index, parts in enumerate(deltas)]
        head = self._head
        return Completion(head.id, head.created, head.model, choices, usage=generation.usage())

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

    async def _stream(
        self, reply: Reply, generation: Generation | NoGeneration, prompts: list[list[int]]
    ) -> None:
        usage = StreamUsage(self._request, generation)
        begun: set[int] = set()
        while not generation.is_finished:
            index, delta = await generation.next()
            first = index not in begun
            if not delta and not (first and self._echoes):
                continue
            begun.add(index)
            choice = self._choice(index, delta, prompts, first=first)
            await reply.event(encode(self._chunk([choice], usage)))
        await usage.end(reply, self._chunk([], usage))

    def _chunk(self, choices: list[CompletionChoice], usage: StreamUsage) -> Completion:
        head = self._head
        return Completion(head.id, head.created, head.model, choices, usage=usage.so_far())


def _check_echo_only(request: CompletionRequest) -> None:
    if not request.echo:
        raise RequestError(
            "max_tokens is 0, which leaves nothing to answer without echo: true; set it, or ask for at least "
            "one token.",
            param="max_tokens",
        )
    if request.min_tokens:
        raise RequestError(
            f"min_tokens ({request.min_tokens}) is above max_tokens (0); lower it.", param="min_tokens"
        )


def _joined(parts: list[Delta]) -> Delta:
    whole = Delta(finish_reason=parts[-1].finish_reason, stop_reason=parts[-1].stop_reason)
    whole.text = "".join(part.text for part in parts)
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs
        whole.offsets += part.offsets
    return whole
