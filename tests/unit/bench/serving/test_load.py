"""Arrivals of an open loop, and how many are open in a closed one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from time import perf_counter

import pytest

from firstlight.bench.measures import RequestRecord
from firstlight.bench.serving.load import closed_loop, open_loop, poisson_times


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times_s = poisson_times(4.0, 20_000, seed=1)
    gaps_s = [later - earlier for earlier, later in pairwise([0.0, *times_s])]
    mean = sum(gaps_s) / len(gaps_s)
    deviation = (sum((gap - mean) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert min(gaps_s) > 0
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)  # exponential: the two are equal


def test_arrivals_repeat_with_their_seed() -> None:
    assert poisson_times(1, 10, seed=3) == poisson_times(1, 10, seed=3) != poisson_times(1, 10, seed=4)


async def test_a_closed_loop_keeps_its_number_open() -> None:
    num_open, most_open, seen = 0, 0, []

    async def send(body: bytes, due_s: float) -> RequestRecord:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        for _ in range(3):
            await asyncio.sleep(0)
        num_open -= 1
        return RequestRecord(due_s, perf_counter())

    bodies = [b"%d" % index for index in range(20)]
    records = await closed_loop(bodies, 4, send, seen.append)
    assert len(records) == len(seen) == 20
    assert most_open == 4


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    all_sent, num_open = asyncio.Event(), 0

    async def send(body: bytes, due_s: float) -> RequestRecord:
        nonlocal num_open
        num_open += 1
        if num_open == 10:
            all_sent.set()
        await all_sent.wait()  # nobody is answered before all were sent
        return RequestRecord(due_s, perf_counter())

    start_s = perf_counter()
    async with asyncio.timeout(10):
        records = await open_loop(
            [b""] * 10, [index * 0.001 for index in range(10)], send, lambda record: None
        )
    due = sorted(record.started_s - start_s for record in records)
    assert due[-1] - due[0] == pytest.approx(0.009, abs=1e-6)
