"""The benchmark of collectives: the fit, and a short run between real processes."""

from __future__ import annotations

import pytest

from firstlight.base.errors import UsageError
from firstlight.bench.machine.collectives import (
    TOO_NOISY,
    CollectivesOrder,
    CollectivesReport,
    SizePoint,
    bench_collectives,
    fit,
    tables,
)
from firstlight.cli.plan_values import points as parse_points


def test_a_fit_finds_latency_and_rate() -> None:
    found = fit([(size, 20e-6 + size / 5e9) for size in (1024, 4096, 2**16, 2**20, 2**24)])
    assert found.latency_s == pytest.approx(20e-6)
    assert found.bytes_per_s == pytest.approx(5e9)
    assert found.worst == pytest.approx(0.0, abs=1e-9)


def test_a_fit_is_never_negative() -> None:
    assert fit([(1024, 1e-6), (2**20, 2e-3)]).latency_s == 0.0
    assert fit([(1024, 2e-6), (2**20, 1e-6)]).s_per_byte == 0.0


def test_one_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="sums with nobody"):
        bench_collectives(CollectivesOrder(1), lambda done, total: None)


@pytest.mark.parametrize(
    ("times_us", "is_noisy"),
    [((20, 20.4, 20.2, 21), False), ((20, 20, 15, 21), True), ((20, 60, 60, 60), True)],
)
def test_times_that_are_too_noisy_to_plan_with_say_so(times_us: tuple[float, ...], is_noisy: bool) -> None:
    points = [
        SizePoint("gloo", 1024 * 2**power, 9, time_us / 1e6, time_us / 1e6, 0.0)
        for power, time_us in enumerate(times_us)
    ]
    found = fit([(point.num_bytes, point.median_s) for point in points])
    _, fits = tables(CollectivesReport(2, 2, {"gloo": "gloo"}, points, {"gloo": found}))
    (note,) = fits.columns[5].cells
    assert note == (TOO_NOISY if is_noisy else "")


@pytest.mark.slow
def test_two_ranks_are_measured_over_shared_memory_and_gloo() -> None:
    heard: list[tuple[int, int]] = []
    order = CollectivesOrder(rounds=1, sizes=(1024, 2**16, 2**20))
    report = bench_collectives(order, lambda *at: heard.append(at))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert list(report.words) == list(report.fits) == ["shared memory", "gloo"]
    assert [point.num_calls for point in report.points] == [150, 150, 150, 150, 48, 48]
    assert all(0.0 < point.median_s <= point.p99_s for point in report.points)
    times, fits = tables(report)
    assert times.row_count == 3
    written, _ = fits.columns[4].cells
    assert len(parse_points("--all-reduce-times", str(written))) == 3
