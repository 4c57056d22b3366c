"""The tail of the progress file, and rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base.phases import PROGRESS_FILE, ProgressLine, ProgressWriter
from firstlight.launch.progress import PhaseTrack, ProgressTail


def test_lines_are_handed_out_once_and_whole(tmp_path: Path) -> None:
    tail = ProgressTail(tmp_path)
    assert tail.read() == []
    writer = ProgressWriter(tmp_path, 3)
    writer.report("weights", 1, 2, "layers", "layer 0")
    with (tmp_path / PROGRESS_FILE).open("ab") as file:
        file.write(b'{"time_s": 1.0, "rank": 0, ')
    first = tail.read()
    assert [(x.rank, x.phase, x.done, x.total, x.unit, x.detail) for x in first] == [
        (3, "weights", 1, 2, "layers", "layer 0")
    ]
    with (tmp_path / PROGRESS_FILE).open("ab") as file:
        file.write(b'"phase": "kv"}\nrubbish\n')
    assert [x.phase for x in tail.read()] == ["kv"]
    writer.close()
    tail.close()


def test_pace_needs_two_different_moments() -> None:
    first = ProgressLine(time_s=1.0, rank=0, phase="weights", done=0, total=10)
    track = PhaseTrack(first, first)
    assert track.pace.per_s is None
    later = track.followed_by(ProgressLine(time_s=3.0, rank=0, phase="weights", done=4, total=10))
    assert later.pace.per_s == pytest.approx(2.0)
    assert later.pace.remaining_s == pytest.approx(3.0)


def test_without_a_total_there_is_a_rate_but_no_end() -> None:
    first = ProgressLine(time_s=1.0, rank=0, phase="compile", done=0)
    pace = PhaseTrack(first, ProgressLine(time_s=2.0, rank=0, phase="compile", done=4)).pace
    assert (pace.per_s, pace.remaining_s) == (4.0, None)
