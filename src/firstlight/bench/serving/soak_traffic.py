"""The mixed traffic of a soak: requests of every kind, many of them broken off by their client.

What is sent is drawn by a pure function of a seeded generator. Invariant: every exchange ends in one of the
outcomes named here, and "failed" keeps its reason.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from firstlight.bench.serving.completions import PATHS, Events, decode_event, error_text, record_of
from firstlight.bench.serving.http_client import HttpClient, Reply
from firstlight.bench.serving.prompts import WORDS

COMPLETE, DISCONNECT, DELETE = "complete", "disconnect", "delete"
BUSY = (429, 503)
_LONGEST_PROMPT, _LONGEST_ANSWER = 600, 128
_NUM_PREFIXES = 4
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Subject:
    """What must be known of the server in order to ask it sensible things."""

    model: str
    max_model_len: int
    vocab_size: int
    has_chat: bool


@dataclass(frozen=True)
class Exchange:
    """One request and how its client lets it end: after so many chunks or seconds, or not before its end."""

    path: str
    body: dict[str, Any]
    ending: str
    after_chunks: int
    after_s: float


def draw_exchange(draw: random.Random, subject: Subject) -> Exchange:
    """The next request. Half of the prompts begin with one of a few prefixes, which the cache can reuse."""
    is_chat = subject.has_chat and draw.random() < 0.5
    room = min(_LONGEST_PROMPT, subject.max_model_len // 4)
    length = _log_uniform(draw, 4, room)
    # Words may be several tokens each, and a template adds its own.
    words = _words(draw, max(1, length // 6 if room < _LONGEST_PROMPT else length // 2))
    body: dict[str, Any] = {
        "model": subject.model,
        "max_tokens": _log_uniform(draw, 1, min(_LONGEST_ANSWER, subject.max_model_len // 4)),
        "stream": draw.random() < 0.7,
        **_sampling(draw),
    }
    if is_chat:
        body["messages"] = [{"role": "user", "content": words}]
    elif draw.random() < 0.5:
        body["prompt"] = words
    else:
        body["prompt"] = _token_ids(draw, length, subject.vocab_size)
    ending = draw.choices((COMPLETE, DISCONNECT, DELETE), (0.75, 0.15, 0.10))[0]
    return Exchange(
        PATHS["chat" if is_chat else "completions"], body, ending, draw.randrange(20), draw.uniform(0, 4)
    )


def _sampling(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": draw.choice((0.0, 0.7, 1.0, 1.5)), "seed": draw.randrange(2**31)}
    if draw.random() < 0.5:
        fields["ignore_eos"] = True
    rare = (
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"stop": [" the", "\n\n"]},
        {"n": 2},
    )
    for extra in rare:
        if draw.random() < 0.1:
            fields |= extra
    return fields


def _words(draw: random.Random, count: int) -> str:
    own = draw.choices(WORDS, k=count)
    if draw.random() < 0.5:
        prefix = random.Random(draw.randrange(_NUM_PREFIXES)).choices(WORDS, k=count)
        own = prefix + own[: count // 2]
    return " ".join(own)


def _token_ids(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    own = draw.choices(range(vocab_size), k=length)
    if draw.random() < 0.5:
        shared = random.Random(draw.randrange(_NUM_PREFIXES)).choices(range(vocab_size), k=length)
        own[: length // 2] = shared[: length // 2]
    return own


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(least * (most / least) ** draw.random())


@dataclass
class Traffic:
    """Clients that send exchanges one after the other until they are told to stop."""

    client: HttpClient
    subject: Subject
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _num_sent: int = 0

    async def run(self, num_clients: int, until_s: float) -> None:
        """Returns when all clients are done, some time after `until_s` on the clock of `time.monotonic`."""
        async with asyncio.TaskGroup() as group:
            for number in range(num_clients):
                group.create_task(self._client(random.Random(self.seed * 1_000_003 + number), until_s))

    async def _client(self, draw: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            exchange = draw_exchange(draw, self.subject)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    outcome = await self.perform(exchange)
            except TimeoutError:
                outcome = self._failed(f"no complete answer in {_TIMEOUT_S:g} s")
            except OSError as error:
                outcome = self._failed(str(error) or type(error).__name__)
                await asyncio.sleep(0.2)  # a server that is gone must not be asked a thousand times a second
            self.outcomes[outcome] += 1

    async def perform(self, exchange: Exchange) -> str:
        """Sends one request and lets it end as it says; the outcome."""
        self._num_sent += 1
        request_id = f"soak-{self.seed}-{self._num_sent}"
        events: Events = []
        is_time = asyncio.Event()

        def on_event(time_s: float, data: bytes) -> None:
            events.append((time_s, data))
            if len(events) > exchange.after_chunks:
                is_time.set()

        body, header = msgspec.json.encode(exchange.body), f"X-Request-Id: {request_id}\r\n"
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.client.request("POST", exchange.path, body, on_event, header))
            if exchange.ending != COMPLETE and not await _ends_before(task, is_time, exchange.after_s):
                if exchange.ending == DISCONNECT:
                    task.cancel()
                    return "disconnected"
                await self.client.request("DELETE", f"/v1/requests/{request_id}")
        return self._judge(exchange, task.result(), events, started_s)

    def _judge(self, exchange: Exchange, reply: Reply, events: Events, started_s: float) -> str:
        if reply.status in BUSY:
            return "busy"
        if exchange.body["stream"]:
            error = record_of(started_s, started_s, reply, events, time.perf_counter()).error
        else:
            error = _error_in_whole(reply)
        if error is not None:
            return self._failed(error)
        return "deleted" if exchange.ending == DELETE else "completed"

    def _failed(self, reason: str) -> str:
        self.failures[reason] += 1
        return "failed"


async def _ends_before(task: asyncio.Task[Reply], is_time: asyncio.Event, seconds: float) -> bool:
    """Whether the answer is complete before it is time to break it off."""
    waiter = asyncio.create_task(is_time.wait())
    await asyncio.wait((task, waiter), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    return task.done()


def _error_in_whole(reply: Reply) -> str | None:
    if reply.status != 200:
        return error_text(reply)
    try:
        event = decode_event(bytes(reply.body))
    except msgspec.DecodeError:
        return f"not an answer: {bytes(reply.body[:80])!r}"
    return None if event.has_end else "an answer without a finish reason"
