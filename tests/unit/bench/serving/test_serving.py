"""The serving benchmark against a scripted server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from firstlight.base.errors import EngineError, ResourceError, UsageError
from firstlight.bench.report import save_json
from firstlight.bench.serving.http_client import HttpClient
from firstlight.bench.serving.prompts import SyntheticPrompts
from firstlight.bench.serving.server_process import ended
from firstlight.bench.serving.serving import ServingOrder, bench_serving, first_model
from firstlight.bench.serving.serving_report import ServingReport, plot, tables
from support.fake_openai import Behaviour, FakeOpenAI


def run(server: FakeOpenAI, **changes: object) -> ServingReport:
    values: dict[str, object] = {
        "url": server.url,
        "num_requests": 6,
        "output_tokens": 8,
        "concurrency": 3,
        "num_warmup": 2,
        "prompts": SyntheticPrompts(num_tokens=5),
    }
    if "rate_per_s" in changes:
        del values["concurrency"]
    return bench_serving(ServingOrder(**(values | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_closed_loop(api: str, line_end: str) -> None:
    with FakeOpenAI(Behaviour(num_cached=2, line_end=line_end)) as server:
        report = run(server, api=api, limits_ms={"e2e": 60_000.0})
    assert (report.num_requests, report.num_errors, report.output_tokens) == (6, 0, 48)
    assert (report.prompt_tokens, report.cached_tokens, report.tokens_per_chunk) == (30, 12, 1.0)
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    assert report.itl_s is not None
    assert report.itl_s.count == 6 * 7
    assert report.goodput_per_s == pytest.approx(report.requests_per_s)
    assert report.output_tokens_per_s == pytest.approx(48 / report.duration_s)
    assert "concurrency 3" in report.loop
    assert "12 of 30" in report.prefix_cache


def test_what_is_sent() -> None:
    with FakeOpenAI() as server:
        run(server, temperature=0.5)
    assert len(server.requests) == 8  # the warm-up too
    assert server.num_connections <= 4  # kept alive: one each, and at most one to ask for the model
    first = server.requests[-1]
    assert (first["model"], first["max_tokens"], first["ignore_eos"]) == ("fake", 8, True)
    assert (first["stream"], first["stream_options"]) == (True, {"include_usage": True})
    assert first["temperature"] == 0.5
    assert len(first["prompt"]) == 5


def test_an_open_loop_says_so() -> None:
    with FakeOpenAI() as server:
        report = run(server, rate_per_s=500.0)
    assert report.num_errors == 0
    assert "open loop" in report.loop


def test_tokens_may_come_several_at_a_time() -> None:
    with FakeOpenAI(Behaviour(tokens_per_chunk=4)) as server:
        report = run(server)
    assert report.tokens_per_chunk == 4.0
    assert report.itl_s is not None
    assert report.itl_s.count == 6


def test_without_usage_chunks_are_counted_and_that_is_said() -> None:
    with FakeOpenAI(Behaviour(sends_usage=False)) as server:
        report = run(server)
    assert (report.output_tokens, report.counted_by) == (48, "chunks")


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        (Behaviour(breaks_after=2), "broke off"),
        (Behaviour(error_after=2), "the engine fell over"),
        (Behaviour(status=429), "429: no, thank you"),
        (Behaviour(status=500), "500: no, thank you"),
    ],
)
def test_errors_are_counted_and_shown(behaviour: Behaviour, says: str) -> None:
    with FakeOpenAI(behaviour) as server:
        report = run(server, num_warmup=0, limits_ms={"ttft": 1e6})
    assert report.num_errors == 6
    assert any(says in text for text in report.errors)
    assert report.goodput_per_s == 0
    assert tables(report)


def test_a_server_that_answers_no_warmup_ends_it() -> None:
    with FakeOpenAI(Behaviour(status=400)) as server, pytest.raises(EngineError, match="no, thank you"):
        run(server)


def test_a_server_that_is_starting_is_waited_for() -> None:
    with FakeOpenAI(Behaviour(starting=1)) as server:
        assert run(server).num_errors == 0


def first_model_of(server: FakeOpenAI, wait_s: float, heard: list[str]) -> str:
    async def ask() -> str:
        client = HttpClient(server.url)
        try:
            return await first_model(client, None, wait_s, heard.append)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_who_waits_hears_of_it_and_not_for_ever() -> None:
    heard: list[str] = []
    with FakeOpenAI(Behaviour(starting=1, starting_code="starting")) as server:
        assert first_model_of(server, 60.0, heard) == "fake"
        assert heard == ["waiting up to 60 s, 0 s so far (503: starting)"]
        server.behaviour.starting = 1000
        with pytest.raises(EngineError, match="does not serve"):
            first_model_of(server, 0.3, heard)


@pytest.mark.parametrize("code", ["engine_failed", "stopping", "failed", "lost"])
def test_a_server_that_has_failed_is_not_waited_for(code: str) -> None:
    heard: list[str] = []
    failed = Behaviour(starting=1000, starting_code=code)
    with FakeOpenAI(failed) as server, pytest.raises(EngineError, match="503: starting"):
        first_model_of(server, 60.0, heard)
    assert heard == []


def test_the_error_of_a_server_that_has_ended_is_told_once() -> None:
    log = "loading\nerror: /m does not exist.\n  what to do: Check the path.\n"
    own = ended("the server ended with exit code 3", log, "Run it alone.").explain()
    assert own == "the server ended with exit code 3: /m does not exist.\n  what to do: Check the path."
    assert (
        ended("it ended", "Killed\n", "Run it alone.").explain()
        == "it ended: Killed.\n  what to do: Run it alone."
    )


def test_nobody_there() -> None:
    with FakeOpenAI() as server:
        pass
    with pytest.raises(ResourceError, match="no answer"):
        run(server)


def test_connections_that_the_server_closes_are_made_anew() -> None:
    with FakeOpenAI(Behaviour(closes=True)) as server:
        assert run(server).num_errors == 0


def test_an_answer_that_takes_too_long() -> None:
    with FakeOpenAI(Behaviour(chunk_delay_s=5.0)) as server:
        report = run(server, num_warmup=0, num_requests=1, timeout_s=0.1)
    assert list(report.errors) == ["no complete answer in 0.1 s"]


async def test_cancelling_closes_the_connection() -> None:
    with FakeOpenAI(Behaviour(chunk_delay_s=0.01)) as server:
        client, first = HttpClient(server.url), asyncio.Event()
        body = json.dumps({"stream": True, "max_tokens": 10_000}).encode()
        task = asyncio.create_task(client.request("POST", "/v1/completions", body, lambda *_: first.set()))
        async with asyncio.timeout(10):
            await first.wait()
            task.cancel()
            while not server.num_broken:
                await asyncio.sleep(0.005)
        await client.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"rate_per_s": 1.0, "concurrency": 1},
        {"concurrency": None},
        {"api": "embeddings"},
        {"url": "ftp://x"},
        {"prompts": SyntheticPrompts(num_tokens=4, num_shared=5)},
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        run(FakeOpenAI(url="http://127.0.0.1:9"), **changes)


def test_json_and_picture(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        report = run(server)
    save_json(tmp_path / "r.json", "serving", report)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["benchmark"] == "serving"
    assert content["ttft_s"]["percentiles"]["50"] > 0
    assert content["provenance"]["firstlight"]
    plot(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
