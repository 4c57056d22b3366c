"""The traffic of a soak against a scripted server, and how it is judged."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from firstlight.base.errors import EngineError
from firstlight.bench.measures import peak_growth
from firstlight.bench.serving.http_client import HttpClient
from firstlight.bench.serving.soak import SoakReport, problems, read_gauges, table
from firstlight.bench.serving.soak_traffic import (
    COMPLETE,
    DELETE,
    DISCONNECT,
    Exchange,
    Subject,
    Traffic,
    draw_exchange,
)
from support.fake_openai import Behaviour, FakeOpenAI

SUBJECT = Subject("fake", 2048, 49152, has_chat=True)


def drawn(subject: Subject = SUBJECT, count: int = 400) -> list[Exchange]:
    draw = random.Random(1)
    return [draw_exchange(draw, subject) for _ in range(count)]


def test_the_traffic_is_of_every_kind() -> None:
    exchanges = drawn()
    assert {exchange.ending for exchange in exchanges} == {COMPLETE, DISCONNECT, DELETE}
    assert {exchange.path for exchange in exchanges} == {"/v1/completions", "/v1/chat/completions"}
    assert {exchange.body["stream"] for exchange in exchanges} == {True, False}
    fields = {name for exchange in exchanges for name in exchange.body}
    assert fields >= {"top_p", "top_k", "min_p", "stop", "n", "ignore_eos", "repetition_penalty", "seed"}
    assert len({exchange.body["max_tokens"] for exchange in exchanges}) > 30


def test_prompts_share_prefixes_and_are_within_the_model() -> None:
    ids = [e.body["prompt"] for e in drawn() if isinstance(e.body.get("prompt"), list)]
    beginnings = [tuple(prompt[:4]) for prompt in ids if len(prompt) >= 8]
    assert len(set(beginnings)) < 0.75 * len(beginnings)
    assert max(len(prompt) for prompt in ids) <= 600
    tiny = Subject("fake", 256, 100, has_chat=False)
    for exchange in drawn(tiny):
        assert exchange.path == "/v1/completions"
        prompt = exchange.body["prompt"]
        assert len(prompt) + exchange.body["max_tokens"] < 256
        assert isinstance(prompt, str) or max(prompt) < 100


async def perform(server: FakeOpenAI, *, stream: bool, ending: str, after_s: float = 30.0) -> Traffic:
    traffic = Traffic(HttpClient(server.url), SUBJECT, seed=0)
    body = {"model": "fake", "prompt": "x", "max_tokens": 10, "stream": stream}
    outcome = await traffic.perform(Exchange("/v1/completions", body, ending, 2, after_s))
    traffic.outcomes[outcome] += 1
    await traffic.client.close()
    return traffic


@pytest.mark.parametrize("stream", [True, False])
async def test_a_complete_answer(stream: bool) -> None:
    with FakeOpenAI() as server:
        traffic = await perform(server, stream=stream, ending=COMPLETE)
    assert (traffic.outcomes, traffic.failures) == ({"completed": 1}, {})


async def test_a_client_that_goes_away() -> None:
    with FakeOpenAI(Behaviour(chunk_delay_s=0.05)) as server:
        traffic = await perform(server, stream=True, ending=DISCONNECT)
    assert traffic.outcomes == {"disconnected": 1}


async def test_a_client_that_deletes_its_request_and_waits_for_the_end() -> None:
    with FakeOpenAI(Behaviour(chunk_delay_s=0.05)) as server:
        traffic = await perform(server, stream=True, ending=DELETE)
    assert traffic.outcomes == {"deleted": 1}
    assert server.deleted == ["soak-0-1"]


@pytest.mark.parametrize(
    ("behaviour", "stream", "outcome", "says"),
    [
        (Behaviour(status=429), True, "busy", ""),
        (Behaviour(status=400), True, "failed", "400: no, thank you"),
        (Behaviour(status=500), False, "failed", "500: no, thank you"),
        (Behaviour(error_after=1), True, "failed", "fell over"),
    ],
)
async def test_what_is_not_an_answer(behaviour: Behaviour, stream: bool, outcome: str, says: str) -> None:
    with FakeOpenAI(behaviour) as server:
        traffic = await perform(server, stream=stream, ending=COMPLETE)
    assert traffic.outcomes == {outcome: 1}
    assert all(says in reason for reason in traffic.failures)
    assert bool(traffic.failures) == bool(says)


GOOD = SoakReport(
    model="m",
    duration_s=60.0,
    outcomes={"completed": 10},
    failures={},
    left_over={"kv_pages_used": 0.0},
    memory=[(0.0, 1e9), (60.0, 1e9)],
    growth_bytes=0.0,
    allowed_growth_bytes=1e7,
    problems=[],
)


def test_a_good_soak_has_no_problems() -> None:
    assert problems(GOOD, "INFO all is well") == []
    assert table(GOOD)


@pytest.mark.parametrize(
    ("changes", "log", "says"),
    [
        ({"failures": {"500: no": 3}}, "", "3 requests failed"),
        ({"left_over": {"kv_pages_used": 2.0}}, "", "kv_pages_used is 2"),
        ({"growth_bytes": 2e7}, "", "peak of memory grew by 20.0 MB"),
        ({"outcomes": {"busy": 4}}, "", "no request was completed"),
        ({}, "Traceback (most recent call last):\n", "1 tracebacks"),
    ],
)
def test_each_problem_is_named(changes: dict[str, object], log: str, says: str) -> None:
    (problem,) = problems(replace(GOOD, **changes), log)  # type: ignore[arg-type]
    assert says in problem


def test_growth_is_that_of_the_peaks() -> None:
    assert peak_growth([(x, 5 + 2 * x) for x in range(10)]) == 12
    # What an allocator gives back for a while is no growth when it is taken again.
    dips = [(x, 1200 - (300 if 10 < x < 60 and x % 7 else 0)) for x in range(100)]
    assert peak_growth(dips) == 0
    assert peak_growth([(1.0, 7.0)]) == peak_growth([]) == 0


def test_gauges_of_prometheus() -> None:
    text = "# HELP firstlight:kv_pages_used x\nfirstlight:kv_pages_used 3.0\nfirstlight:kv_pages_used_x 4\n"
    assert read_gauges(text, ["kv_pages_used"]) == {"kv_pages_used": 3.0}
    with pytest.raises(EngineError, match="requests_running"):
        read_gauges(text, ["requests_running"])
