"""Phases read from black boxes, and rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.launch.timeline.progress import BoxFollower, PhaseTrack, ProgressLine


def test_no_phase_is_missed_and_each_ends_with_its_last_odometer(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.box"
    follower = BoxFollower({"rank-3": path})
    assert follower.read(1.0) == []
    create_box(path, role="rank", rank=3, run_id="r")
    box = BlackBox(path)
    box.enter_phase("weights", 2, "layers", "first")
    box.advance(1)
    (first,) = follower.read(2.0)
    assert (first.name, first.rank, first.phase, first.done, first.total, first.unit, first.detail) == (
        "rank-3",
        3,
        "weights",
        1,
        2,
        "layers",
        "first",
    )
    assert follower.read(3.0) == []
    box.advance(2)
    box.enter_phase("kv")
    box.enter_phase("ready")
    lines = follower.read(4.0)
    assert [(line.phase, line.done) for line in lines] == [("weights", 2), ("kv", 0), ("ready", 0)]
    assert lines[0].time_s == lines[1].start_s
    assert lines[2].time_s == 4.0


def line(time_s: float, done: int, total: int = 0) -> ProgressLine:
    return ProgressLine(
        time_s=time_s, name="rank-0", rank=0, phase="weights", start_s=1.0, done=done, total=total
    )


def test_pace_needs_progress() -> None:
    track = PhaseTrack(line(1.0, 0, 10))
    assert track.pace.per_s is None
    later = track.followed_by(line(3.0, 4, 10))
    assert later.pace.per_s == pytest.approx(2.0)
    assert later.pace.remaining_s == pytest.approx(3.0)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    track = PhaseTrack(line(1.0, 0, 1000))
    for second in range(2, 10):
        track = track.followed_by(line(float(second), 100, 1000))
    for second in range(10, 20):
        track = track.followed_by(line(float(second), 100 + 2 * (second - 9), 1000))
    assert track.pace.per_s == pytest.approx(2.0)


def test_without_a_total_there_is_a_rate_but_no_end() -> None:
    pace = PhaseTrack(line(2.0, 4)).pace
    assert (pace.per_s, pace.remaining_s) == (4.0, None)


def test_the_budget_grows_with_a_slow_disk_and_not_with_a_stuck_process() -> None:
    track = PhaseTrack(line(1.0, 0, 10)).followed_by(line(3.0, 5, 10))
    budget_s = track.budget_s
    assert budget_s is not None
    stuck = track.followed_by(line(60.0, 5, 10))
    assert stuck.budget_s == budget_s
    slow = stuck.followed_by(line(61.0, 6, 10))
    assert slow.budget_s is not None
    assert slow.budget_s > 10 * budget_s
    assert PhaseTrack(line(1.0, 0, 10)).budget_s is None
