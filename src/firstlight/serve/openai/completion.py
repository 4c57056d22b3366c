"""What the answers of both completion endpoints have in common: their head, their job, the usage in streams.

Invariant: a head is made when the request is understood, so that times count from there and an unknown model
is refused before anything is done for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from msgspec import UNSET, UnsetType

from firstlight.engine.params import SamplingParams
from firstlight.serve.http.streaming_response import Reply
from firstlight.serve.openai.choice import TextOptions
from firstlight.serve.openai.generation import Generation, Job, NoGeneration
from firstlight.serve.openai.replies import ChatChunk, Completion, Usage, encode
from firstlight.serve.openai.requests import GenerationRequest


@dataclass(frozen=True)
class Head:
    """The names and times of an answer. `arrived_s` is of the monotonic clock."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    arrived_s: float = field(default_factory=monotonic)

    def job(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        after_text: bool,
    ) -> Job:
        """What is to be generated. `after_text`: the answers continue the text of their prompts."""
        options = TextOptions(
            skip_special_tokens=request.skip_special_tokens,
            include_stop=request.include_stop_str_in_output,
            after_text=after_text,
            token_ids=request.return_token_ids,
        )
        return Job(self.id, prompts, params, request.n, options, request.priority, self.arrived_s)


class StreamUsage:
    """The usage in the chunks of a stream, as its `stream_options` want it."""

    def __init__(self, request: GenerationRequest, generation: Generation | NoGeneration) -> None:
        options = request.stream_options
        self._at_end = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats
        self._generation = generation

    def so_far(self) -> Usage | UnsetType | None:
        """For a chunk within the stream: null where only the last one has it, absent where none does."""
        if self._always:
            return self._generation.usage()
        return None if self._at_end else UNSET

    async def end(self, reply: Reply, chunk: ChatChunk | Completion) -> None:
        """Ends the stream, with `chunk`, which has no choices, where the usage is wanted."""
        if self._at_end:
            chunk.usage = self._generation.usage()
            await reply.event(encode(chunk))
        await reply.done()
