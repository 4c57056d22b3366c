"""Phases from a rank's black box."""

from __future__ import annotations

import pytest

from firstlight.base.blackbox.reader import Odometer, PhaseRecord
from firstlight.bench.serving.startup import StartupReport, StartupRun, phase_durations, table


def entry(start_s: float, phase: str) -> PhaseRecord:
    return PhaseRecord(0, phase, start_s, "", Odometer())


def test_phases_add_up_from_the_launch_to_ready() -> None:
    phases = [
        entry(10.5, "imports"),
        entry(11.0, "imports"),
        entry(12.0, "weights"),
        entry(13.0, "ready"),
        entry(13.2, "serving"),
    ]
    durations = phase_durations(phases, launched_s=10.0, ready_s=3.25 + 10)
    assert durations == {"launch": 0.5, "imports": 1.5, "weights": 1.0, "answer": 0.25}
    assert sum(durations.values()) == pytest.approx(3.25)


def test_without_a_box_all_of_it_is_the_launch() -> None:
    assert phase_durations([], launched_s=1.0, ready_s=3.0) == {"launch": 2.0}


def test_a_phase_that_comes_again_is_one_phase() -> None:
    phases = [entry(1, "build"), entry(2, "kv"), entry(4, "build")]
    assert phase_durations(phases, 0, 5) == {"launch": 1, "build": 2, "kv": 2}


def test_the_table_has_a_row_for_each_phase_of_any_run() -> None:
    one = StartupRun(0.1, 2.0, 2.1, {"launch": 1.0}, 10)
    two = StartupRun(0.1, 2.0, 2.1, {"launch": 1.0, "kv": 1.0}, 10)
    assert table(StartupReport("m", "warm", (one, two))).row_count == 3 + 2
