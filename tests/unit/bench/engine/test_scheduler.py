"""The scheduler benchmark, with few steps."""

from __future__ import annotations

from firstlight.bench.engine.scheduler import bench_scheduler, table


def test_steps_of_all_running_sequences_are_measured() -> None:
    report = bench_scheduler(num_running=8, queues=(0, 50), num_steps=10)
    assert [point.num_waiting for point in report.points] == [0, 50]
    for point in report.points:
        assert point.step_s.count == 10
        assert 0 < point.plan_s < point.step_s.largest
    assert table(report).row_count == 2
