"""How long the next piece of a phase may take."""

from __future__ import annotations

import msgspec
import pytest

from firstlight.base.blackbox.reader import Box, EventRecord, Odometer, PhaseRecord
from firstlight.doctor.case.values_process import BlackBoxSeen
from firstlight.doctor.motion.motion import State, Thresholds, expected_piece_s, judge_motion
from support.case_rows import boxed, busy, one_rank
from support.doctor_scenes import box


def phases(*records: tuple[str, float, Odometer]) -> Box:
    numbered = tuple(
        PhaseRecord(number=number, name=name, start_s=start_s, detail="", odometer=odometer)
        for number, (name, start_s, odometer) in enumerate(records, 1)
    )
    return msgspec.structs.replace(box(), phases=numbered)


@pytest.mark.parametrize(
    ("records", "now_s", "quiet_s", "expected_s"),
    [
        ([("build", 0.0, Odometer(4, 8, "layers"))], 8.0, 0.0, 2.0),
        ([("build", 0.0, Odometer(4, 8, "layers"))], 108.0, 100.0, 2.0),  # stuck: it does not grow
        ([("build", 0.0, Odometer(4, 8, "layers"))], 400.0, 0.0, 100.0),  # slow: it does
        ([("weights", 0.0, Odometer(128 << 20, 1 << 30, "bytes"))], 4.0, 0.0, 2.0),
        ([("weights", 0.0, Odometer(1, 1, "bytes")), ("kv", 30.0, Odometer())], 99.0, 69.0, 30.0),
        ([("device", 0.0, Odometer())], 50.0, 50.0, None),
        ([], 50.0, 50.0, None),
    ],
)
def test_a_piece_takes_what_the_ones_before_took(
    records: list[tuple[str, float, Odometer]], now_s: float, quiet_s: float, expected_s: float | None
) -> None:
    assert expected_piece_s(phases(*records), now_s, quiet_s) == expected_s


@pytest.mark.parametrize(("quiet_s", "state"), [(40.0, State.MOVING), (70.0, State.SPINNING)])
def test_a_slow_phase_may_be_busy_for_longer(quiet_s: float, state: State) -> None:
    """One layer took the time before it stood still, of 102 s in all: three times that is the limit."""
    seen = one_rank(busy("rank-0", 10), boxed("rank-0", 0, phase="build", odometer=Odometer(2, 8, "layers")))
    found = judge_motion(seen, Thresholds(), {"rank-0": quiet_s}).of("rank-0")
    assert found is not None
    assert found.state is state


@pytest.mark.parametrize(("quiet_s", "state"), [(8.0, State.MOVING), (20.0, State.SPINNING)])
def test_a_step_may_take_three_times_the_longest_one(quiet_s: float, state: State) -> None:
    step = EventRecord("steps", 1, 950.0, "step", (1, 1, 512, 4_000_000, 0))
    busy_box = msgspec.structs.replace(box(phase="serving", requests=(1, 0)), events=(step,))
    seen = BlackBoxSeen(path="b", box=busy_box, is_alive=True)
    rows = [*busy("rank-0", 10), (0, "rank-0", seen), (1, "rank-0", seen)]
    found = judge_motion(one_rank(rows), Thresholds(), {"rank-0": quiet_s}).of("rank-0")
    assert found is not None
    assert found.state is state
