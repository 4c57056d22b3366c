"""Two ways to put a server under load: closed loop (so many at a time) and open loop (so many a second).

Invariant: an open loop never waits for the server: requests leave when they are due, however slow the answers
are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from time import perf_counter

from firstlight.bench.measures import RequestRecord

# Sends one request body, due at a time of `perf_counter`.
Send = Callable[[bytes, float], Awaitable[RequestRecord]]
OnDone = Callable[[RequestRecord], None]


def poisson_times(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds from the start: gaps are exponential with the mean 1 / rate."""
    draw = random.Random(seed)
    return list(accumulate(draw.expovariate(rate_per_s) for _ in range(count)))


async def closed_loop(
    bodies: Sequence[bytes], concurrency: int, send: Send, on_done: OnDone
) -> list[RequestRecord]:
    """Keeps `concurrency` requests open until all were answered."""
    left = iter(bodies)
    records: list[RequestRecord] = []

    async def work() -> None:
        for body in left:
            record = await send(body, perf_counter())
            records.append(record)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(work())
    return records


async def open_loop(
    bodies: Sequence[bytes], times_s: Sequence[float], send: Send, on_done: OnDone
) -> list[RequestRecord]:
    """Sends each request at its time, counted from now."""
    start_s = perf_counter()
    records: list[RequestRecord] = []

    async def work(body: bytes, due_s: float) -> None:
        record = await send(body, due_s)
        records.append(record)
        on_done(record)

    async with asyncio.TaskGroup() as group:
        for body, time_s in zip(bodies, times_s, strict=True):
            due_s = start_s + time_s
            await asyncio.sleep(max(0.0, due_s - perf_counter()))
            group.create_task(work(body, due_s))
    return records
