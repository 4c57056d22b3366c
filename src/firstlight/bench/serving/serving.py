"""`firstlight bench serving`: load on an OpenAI-compatible server, and what its users would have felt.

Invariant: warm-up requests are in no number, and what shares the machine with the server, namely this client,
says what it cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import EngineError, UsageError
from firstlight.base.urls import no_answer
from firstlight.bench.measures import RequestRecord
from firstlight.bench.serving.completions import PATHS, Events, error_text, failed, record_of
from firstlight.bench.serving.http_client import HttpClient, Reply
from firstlight.bench.serving.load import closed_loop, open_loop, poisson_times
from firstlight.bench.serving.prompts import SyntheticPrompts, read_requests, repeated, synthetic_requests
from firstlight.bench.serving.serving_report import Outcome, ServingReport, make_report

# Hears of each finished request: how many are done, of how many.
OnProgress = Callable[[int, int], None]
WAIT_S = 300.0  # for a server that says it is still starting
TELL_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ServingOrder:
    """What to send. `concurrency` means a closed loop, `rate_per_s` an open one; exactly one is given."""

    url: str
    api: str = "completions"
    model: str | None = None
    api_key: str | None = None
    prompts: SyntheticPrompts = field(default_factory=lambda: SyntheticPrompts(num_tokens=64))
    file: Path | None = None
    num_requests: int = 32
    output_tokens: int = 128
    concurrency: int | None = None
    rate_per_s: float | None = None
    num_warmup: int = 4
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 600.0
    limits_ms: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `UsageError` for what cannot be meant."""
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise UsageError(
                "a load is either closed or open.", "Give --concurrency N or --rate R, and not both."
            )
        if self.api not in PATHS:
            raise UsageError(f"--api {self.api} is not known.", f"Use {' or '.join(PATHS)}.")
        if not 0 <= self.prompts.num_shared <= self.prompts.num_tokens:
            raise UsageError("--shared-prefix is longer than --prompt-tokens.", "Give a smaller one.")

    @property
    def loop(self) -> str:
        """For the report: what kind of load this is."""
        if self.rate_per_s is not None:
            return f"open loop, Poisson arrivals at {self.rate_per_s:g}/s (seed {self.seed})"
        return f"closed loop, concurrency {self.concurrency}"


def bench_serving(order: ServingOrder, on_progress: OnProgress = lambda done, total: None) -> ServingReport:
    """Runs the load to its end. Raises where the server cannot be reached at all."""
    order.check()
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        return runner.run(_bench(order, on_progress))


def fast_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: the client takes its share of the cores from the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _bench(order: ServingOrder, on_progress: OnProgress) -> ServingReport:
    client = HttpClient(order.url, order.api_key)
    try:
        model = await first_model(client, order.model, WAIT_S)
        sender = Sender(client, PATHS[order.api], order.timeout_s)
        warmup = await closed_loop(
            _bodies(order, model, order.num_warmup, order.seed + 1),
            order.concurrency or 1,
            sender.send,
            lambda record: None,
        )
        _require_one_success(warmup)
        bodies = _bodies(order, model, order.num_requests, order.seed)
        outcome = await _measure(order, sender, bodies, on_progress)
    finally:
        await client.close()
    return make_report(outcome, model=model, api=order.api, loop=order.loop, limits_ms=order.limits_ms)


async def _measure(
    order: ServingOrder, sender: Sender, bodies: list[bytes], on_progress: OnProgress
) -> Outcome:
    num_done = 0

    def on_done(_: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        on_progress(num_done, len(bodies))

    cpu_s, start_s = time.process_time(), time.perf_counter()
    if order.rate_per_s is not None:
        times_s = poisson_times(order.rate_per_s, len(bodies), order.seed)
        records = await open_loop(bodies, times_s, sender.send, on_done)
    else:
        assert order.concurrency is not None
        records = await closed_loop(bodies, order.concurrency, sender.send, on_done)
    return Outcome(
        records=tuple(records),
        start_s=start_s,
        duration_s=time.perf_counter() - start_s,
        client_cpu_s=time.process_time() - cpu_s,
    )


class Sender:
    """Sends a request body and records what came back, whatever it was."""

    def __init__(self, client: HttpClient, path: str, timeout_s: float) -> None:
        self._client, self._path, self._timeout_s = client, path, timeout_s

    async def send(self, body: bytes, due_s: float) -> RequestRecord:
        """`due_s` is when it should have been sent."""
        events: Events = []
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.request(
                    "POST", self._path, body, lambda time_s, data: events.append((time_s, data))
                )
        except TimeoutError:
            return failed(due_s, time.perf_counter(), f"no complete answer in {self._timeout_s:g} s")
        except OSError as error:
            return failed(due_s, time.perf_counter(), str(error) or type(error).__name__)
        return record_of(due_s, sent_s, reply, events, time.perf_counter())


async def first_model(
    client: HttpClient, asked: str | None, wait_s: float, on_wait: Callable[[str], None] = lambda words: None
) -> str:
    """The name to ask for: `asked`, or the first that the server lists.

    Waits while it is starting, of which `on_wait` hears now and then. Raises `EngineError` at once where it
    says that it has failed or stops.
    """
    began_s = told_s = time.monotonic()
    while True:
        try:
            reply = await client.request("GET", "/v1/models")
        except OSError as error:
            raise no_answer(client.base_url, error) from error
        if reply.status != 503:
            return asked or _listed_model(reply)
        now_s = time.monotonic()
        if not _may_come(reply) or now_s - began_s > wait_s:
            raise EngineError(
                f"the server does not serve ({error_text(reply)})",
                "Look at the server's own output, or ask `firstlight doctor`; start it again.",
            )
        if told_s == began_s or now_s - told_s >= TELL_EVERY_S:
            told_s = now_s
            on_wait(f"waiting up to {wait_s:.0f} s, {now_s - began_s:.0f} s so far ({error_text(reply)})")
        await asyncio.sleep(0.25)


def _may_come(reply: Reply) -> bool:
    """Whether a server that answers 503 may serve soon. Others than ours have no code in words."""
    try:
        code = msgspec.json.decode(reply.body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return True
    return not isinstance(code, str) or code == "starting"


def _listed_model(reply: Reply) -> str:
    if reply.status != 200:
        raise UsageError(f"the server refused to list its models: {error_text(reply)}", "Give --model NAME.")
    try:
        return str(msgspec.json.decode(reply.body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise UsageError("the server lists no model.", "Check --url, or give --model NAME.") from error


def _bodies(order: ServingOrder, model: str, count: int, seed: int) -> list[bytes]:
    """Encoded before the clock starts."""
    if order.file is not None:
        prompts = repeated(read_requests(order.file, order.api), count)
    else:
        prompts = synthetic_requests(order.prompts, order.api, count, seed)
    common: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": order.output_tokens,
        "temperature": order.temperature,
    }
    if order.ignore_eos:
        common["ignore_eos"] = True
    return [msgspec.json.encode({**common, **prompt}) for prompt in prompts]


def _require_one_success(warmup: list[RequestRecord]) -> None:
    errors = [record.error for record in warmup if record.error is not None]
    if errors and len(errors) == len(warmup):
        raise EngineError(
            f"no warm-up request was answered; the first said: {errors[0]}",
            "Look at the server's own output.",
        )
