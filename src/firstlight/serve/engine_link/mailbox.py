"""New tokens on their way from the engine to the HTTP request that waits for them.

Invariants: whatever was not taken yet is merged into one output a sequence, so memory is bounded by the
request's own tokens; a first token and an end never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Protocol

from firstlight.engine.messages import FINISH_REJECTED, SequenceOutput, Submit

# A chunk costs some 50 us of the cores that compute, however few tokens it holds. So under load the chunks of
# all answers together are bounded, and no answer waits longer than is seen.
MAX_CHUNKS_PER_S = 400
MAX_PAUSE_S = 0.1
FEW_SEQUENCES = 4

OnOutput = Callable[[SequenceOutput], None]


def pause_of(num_sequences: int) -> float:
    """Seconds between two chunks of an answer while so many sequences run; 0 for a few."""
    return 0.0 if num_sequences <= FEW_SEQUENCES else min(MAX_PAUSE_S, num_sequences / MAX_CHUNKS_PER_S)


class Owner(Protocol):
    """The client that a mailbox belongs to."""

    def forget(self, request_ids: Iterable[str]) -> None: ...

    def close_group(self, group: str) -> None: ...

    def pause_s(self) -> float: ...


class Mailbox:
    """New tokens for one HTTP request, which may have several sequences. Made by `EngineClient.open`."""

    def __init__(
        self, client: Owner, group: str, submits: Sequence[Submit], on_output: OnOutput | None
    ) -> None:
        self._client = client
        self._group = group
        self._open = {submit.request_id: index for index, submit in enumerate(submits)}
        self._waiting: dict[int, SequenceOutput] = {}
        self._wake: asyncio.Future[None] | None = None
        self._on_output = on_output
        self._is_due = False  # what waits may be taken
        self._taken_s = float("-inf")  # when it was last emptied
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> tuple[int, SequenceOutput]:
        """The index of a sequence, and everything that came for it since the last call."""
        while not (self._waiting and self._is_due):
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        index = next(iter(self._waiting))
        output = self._waiting.pop(index)
        if not self._waiting:
            self._is_due, self._taken_s = False, monotonic()
        return index, output

    def abort(self, index: int) -> None:
        """Ends one sequence. What the engine still sends for it is dropped."""
        self._forget([id_ for id_, number in self._open.items() if number == index])
        self._waiting.pop(index, None)

    def close(self) -> None:
        """Ends all sequences that are still open; the request's id is free again."""
        self._forget(list(self._open))
        self._client.close_group(self._group)
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self, ids: list[str]) -> None:
        for id_ in ids:
            del self._open[id_]
        self._client.forget(ids)

    def deliver(self, output: SequenceOutput) -> None:
        """Called by the client for each output of one of our sequences."""
        index = self._open[output.request_id]
        if self._on_output is not None:
            self._on_output(output)
        if output.finish_reason is not None:
            del self._open[output.request_id]
        before = self._waiting.get(index)
        if output.finish_reason == FINISH_REJECTED:  # first, so that the request fails before it is answered
            self._waiting = {index: output, **self._waiting}
        else:
            self._waiting[index] = output if before is None else _merged(before, output)
        if self._is_due or output.finish_reason is not None:
            self._wake_up()
        elif self._timer is None:
            left_s = self._taken_s + self._client.pause_s() - monotonic()
            if left_s <= 0:
                self._wake_up()
            else:
                self._timer = asyncio.get_running_loop().call_later(left_s, self._wake_up)

    def _wake_up(self) -> None:
        self._is_due = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _merged(before: SequenceOutput, after: SequenceOutput) -> SequenceOutput:
    before.token_ids.extend(after.token_ids)
    if after.logprobs:
        before.logprobs = [*(before.logprobs or ()), *after.logprobs]
    before.finish_reason, before.stop_token_id = after.finish_reason, after.stop_token_id
    before.num_cached_tokens = max(before.num_cached_tokens, after.num_cached_tokens)
    before.error = after.error
    return before
