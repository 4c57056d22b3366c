"""The benchmark of the black box: the arithmetic of its verdict, and a small run. Never how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.bench.engine.blackbox import (
    BlackBoxOrder,
    BlackBoxReport,
    Cost,
    bench_blackbox,
    compare,
    measure_costs,
    median_interval,
    tables,
)
from support.serving import write_chat_model


@pytest.mark.parametrize(
    ("count", "cut"),
    # From tables of the sign test at 5 % on two sides; five values are too few to cut any.
    [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (40, 13)],
)
def test_the_interval_of_a_median(count: int, cut: int) -> None:
    values = [float(number) for number in range(count)]
    assert median_interval(values) == (cut, count - 1 - cut)


def test_a_slower_engine_is_told_from_noise() -> None:
    without = [100.0 + number for number in range(12)]
    assert not compare([rate * 0.97 for rate in without], without).is_within_noise
    wavering = [rate * (1.03 if number % 2 else 0.97) for number, rate in enumerate(without)]
    assert compare(wavering, without).is_within_noise


def cost(median_ns: float, *, has_goal: bool = True) -> Cost:
    return Cost(what="event", median_ns=median_ns, least_ns=1.0, most_ns=9e9, has_goal=has_goal)


@pytest.mark.parametrize(
    ("costs", "is_met"),
    [
        ([cost(1000.0)], True),
        ([cost(400.0), cost(1001.0)], False),
        ([cost(400.0), cost(3000.0, has_goal=False)], True),
    ],
)
def test_the_goal_is_for_what_is_written_all_the_time(costs: list[Cost], is_met: bool) -> None:
    report = BlackBoxReport("m", tuple(costs), compare([1.0], [1.0]), 0.0)
    assert report.meets_goal == is_met
    assert ("NOT met" in str(tables(report)[0].title)) != is_met


def test_every_kind_of_write_is_measured() -> None:
    costs = measure_costs(20)
    assert len({cost.what for cost in costs}) == len(costs) == 5
    for one in costs:
        assert 0 < one.least_ns <= one.median_ns <= one.most_ns


def test_the_engine_runs_with_a_box_and_without(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny")
    order = BlackBoxOrder(model=model, writes=10, rounds=2, batch=2, tokens=3, threads=1)
    seen: list[tuple[int, int]] = []
    report = bench_blackbox(order, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert len(report.throughput.with_box) == len(report.throughput.without_box) == 2
    assert report.step_share > 0
    assert "with / without" in tables(report)[2]
