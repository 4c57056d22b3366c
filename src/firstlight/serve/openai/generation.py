"""One HTTP request's sequences, from submission to their last token, as deltas of text.

Invariant: leaving the `async with` block ends every sequence that is still open, so that a client that went
away costs at most one more step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from firstlight.base.errors import RequestError
from firstlight.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_REJECTED,
    Submit,
)
from firstlight.engine.params import SamplingParams
from firstlight.serve.http.errors import engine_error
from firstlight.serve.openai.choice import Choice, Delta, TextOptions
from firstlight.serve.openai.replies import CompletionDetails, PromptDetails, Usage
from firstlight.serve.openai.sampling import of_answer
from firstlight.serve.parsing.answer import AnswerParser
from firstlight.serve.server import Server


@dataclass(frozen=True)
class Job:
    """What is to be generated: `num_answers` for each prompt. `arrived_s` is of the metrics' clock."""

    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    num_answers: int
    options: TextOptions
    priority: int
    arrived_s: float
    parser: Callable[[], AnswerParser | None] = lambda: None  # a new one for each answer


class Generation:
    """The sequences of one job. Choice i belongs to prompt i // num_answers."""

    def __init__(self, server: Server, job: Job) -> None:
        self._server = server
        self._job = job
        total = len(job.prompts) * job.num_answers
        parsers = [job.parser() for _ in range(total)]
        options = job.options
        if any(parsers):
            options = replace(options, shown_ids=server.marker_ids)
        self.choices = [
            Choice(server.text, job.params, options, server.end_token_ids, parser) for parser in parsers
        ]
        self._num_open = total
        self._is_accepted = False

    async def __aenter__(self) -> Self:
        job = self._job
        self._require_room()
        submits = [
            Submit(
                f"{job.request_id}-{index}",
                job.prompts[index // job.num_answers],
                of_answer(job.params, index % job.num_answers),
                job.priority,
            )
            for index in range(len(self.choices))
        ]
        timer = self._server.metrics.timer(job.arrived_s)
        self._mailbox = self._server.client.open(job.request_id, submits, timer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mailbox.close()
        for choice in self.choices:
            if not choice.is_finished:
                self._server.metrics.record_end(FINISH_ABORT, self._job.arrived_s)

    def _require_room(self) -> None:
        """Refuses what could not wait in an empty queue, so that nobody is told to try again for ever."""
        most, count = self._server.config.engine.max_queue, len(self.choices)
        if count > most:
            raise RequestError(
                f"The request asks for {count} answers ({len(self._job.prompts)} prompts, n "
                f"{self._job.num_answers}); this server's queue takes at most {most} (--max-queue). "
                "Send several requests.",
                param="n" if self._job.num_answers > 1 else "prompt",
            )

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    async def next(self) -> tuple[int, Delta]:
        """The index of a choice and what it gained; raises `RequestError` when the engine gave up on it."""
        while True:
            index, output = await self._mailbox.next()
            if output.finish_reason in (FINISH_REJECTED, FINISH_ERROR):
                raise engine_error(output)
            if not self._is_accepted:
                self._is_accepted = True
                self._server.metrics.record_prompt(sum(map(len, self._job.prompts)))
            choice = self.choices[index]
            if choice.is_finished:
                continue
            delta = choice.push(output)
            if delta.finish_reason is not None:
                self._num_open -= 1
                if output.finish_reason is None:
                    self._mailbox.abort(index)
                self._server.metrics.record_end(delta.finish_reason, self._job.arrived_s)
            return index, delta

    async def whole(self) -> list[list[Delta]]:
        """All deltas of each choice, once every one has ended."""
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        while not self.is_finished:
            index, delta = await self.next()
            deltas[index].append(delta)
        return deltas

    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many answers it has."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens for choice in self.choices[:: self._job.num_answers])
        accepted = sum(choice.num_accepted for choice in self.choices)
        rejected = sum(choice.num_drafted for choice in self.choices) - accepted
        reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        details = CompletionDetails(accepted, rejected, reasoning)
        return _usage(self._job, completion_tokens, cached, details)


class NoGeneration:
    """The answers of a job for no tokens (`max_tokens` 0), without the engine: each ends as it begins."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiting = list(range(len(job.prompts) * job.num_answers))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._waiting.clear()

    @property
    def is_finished(self) -> bool:
        """Whether every choice was given out."""
        return not self._waiting

    async def next(self) -> tuple[int, Delta]:
        """The index of a choice, and its end."""
        return self._waiting.pop(0), Delta(finish_reason=FINISH_LENGTH)

    async def whole(self) -> list[list[Delta]]:
        """The end of each choice."""
        return [[Delta(finish_reason=FINISH_LENGTH)] for _ in self._waiting]

    def usage(self) -> Usage:
        """Only the prompts."""
        return _usage(self._job, 0, 0, CompletionDetails())


def _usage(job: Job, completion_tokens: int, cached_tokens: int, details: CompletionDetails) -> Usage:
    prompt_tokens = sum(map(len, job.prompts))
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptDetails(cached_tokens), details)
