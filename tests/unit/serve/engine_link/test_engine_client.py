"""The mailbox of a request: order, merging, and what is dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from firstlight.engine.messages import (
    FINISH_LENGTH,
    FINISH_REJECTED,
    EngineStats,
    SequenceOutput,
    Submit,
    TokenLogprobs,
)
from firstlight.engine.params import SamplingParams
from firstlight.serve.engine_link.engine_client import EngineClient
from firstlight.serve.engine_link.mailbox import Mailbox, pause_of


class RecordingClient(EngineClient):
    """A client without sockets."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.forgotten: list[str] = []

    def forget(self, request_ids: object) -> None:
        self.forgotten += list(request_ids)  # type: ignore[call-overload]


def mailbox(count: int = 1) -> tuple[RecordingClient, Mailbox]:
    client = RecordingClient()
    submits = [Submit(f"r-{i}", [1], SamplingParams()) for i in range(count)]
    return client, Mailbox(client, "r", submits, None)


def output(index: int, *ids: int, reason: str | None = None, cached: int = 0) -> SequenceOutput:
    logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
    return SequenceOutput(f"r-{index}", list(ids), logprobs, reason, None, cached)


async def test_what_a_slow_client_has_not_taken_is_one_output() -> None:
    _, box = mailbox(2)
    for token in range(1000):
        box.deliver(output(0, token, cached=5 if token == 0 else 0))
        box.deliver(output(1, token))
    box.deliver(output(0, 1000, reason=FINISH_LENGTH))
    assert len(box._waiting) == 2
    index, merged = await box.next()
    assert (index, merged.token_ids, merged.finish_reason) == (0, list(range(1001)), FINISH_LENGTH)
    assert merged.logprobs is not None
    assert [item.token_id for item in merged.logprobs] == list(range(1001))
    assert merged.num_cached_tokens == 5
    index, merged = await box.next()
    assert (index, len(merged.token_ids), merged.finish_reason) == (1, 1000, None)


async def test_a_waiting_reader_is_woken() -> None:
    _, box = mailbox()
    reader = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    box.deliver(output(0, 7))
    assert (await reader)[1].token_ids == [7]


async def test_a_rejection_comes_before_everything_else() -> None:
    _, box = mailbox(2)
    box.deliver(output(0, 1))
    box.deliver(output(1, reason=FINISH_REJECTED))
    assert (await box.next())[0] == 1


def test_closing_forgets_only_what_is_open() -> None:
    client, box = mailbox(3)
    box.deliver(output(0, reason=FINISH_LENGTH))
    box.abort(1)
    assert client.forgotten == ["r-1"]
    box.close()
    assert client.forgotten == ["r-1", "r-2"]


def test_steps_are_heard_and_their_figures_kept() -> None:
    from firstlight.engine.messages import StepOutputs

    heard: list[EngineStats] = []
    client = EngineClient(Path("/nowhere"), heard.append)
    stats = EngineStats(num_running=3)
    client._dispatch(StepOutputs([output(0, 1)], stats))  # of a request aborted a moment ago
    assert (client.stats, heard) == (stats, [stats])


def test_before_the_engine_is_ready_nothing_is_submitted() -> None:
    from firstlight.base.errors import RequestError

    with pytest.raises(RequestError, match="not ready yet"):
        EngineClient(Path("/nowhere")).open("r", [])


class Crowded(RecordingClient):
    """A client with so many answers that each may send ten chunks a second."""

    def pause_s(self) -> float:
        return 0.1


async def test_under_load_tokens_come_in_chunks_but_the_first_and_the_last_at_once() -> None:
    box = Mailbox(Crowded(), "r", [Submit("r-0", [1], SamplingParams())], None)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    box.deliver(output(0, 1))
    assert (await box.next())[1].token_ids == [1]
    assert loop.time() - started_s < 0.09
    for token in (2, 3, 4):
        box.deliver(output(0, token))
    assert (await box.next())[1].token_ids == [2, 3, 4]
    assert loop.time() - started_s >= 0.1
    ended_s = loop.time()
    box.deliver(output(0, 5))
    box.deliver(output(0, 6, reason=FINISH_LENGTH))
    assert (await box.next())[1].token_ids == [5, 6]
    assert loop.time() - ended_s < 0.09
    box.close()


def test_a_pause_is_bounded_and_a_few_answers_have_none() -> None:
    assert [pause_of(count) for count in (1, 4, 8, 32, 1000)] == [0.0, 0.0, 0.02, 0.08, 0.1]
