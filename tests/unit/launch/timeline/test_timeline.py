"""Black boxes of several processes merged: order, times, states, and what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstlight.base.blackbox.events import STEP, named_values
from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.reader import Box, Collective, EventRecord, Odometer, PhaseRecord
from firstlight.base.blackbox.store import box_path
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.errors import UsageError
from firstlight.launch.timeline.timeline import (
    EndedPhase,
    EventEntry,
    PhaseEntry,
    Timeline,
    merge,
    read_timeline,
)
from firstlight.launch.timeline.timeline_text import text_of

WALL_S = 1_700_000_000.0


def phase(number: int, name: str, start_s: float, done: int = 0, total: int = 0) -> PhaseRecord:
    return PhaseRecord(number, name, start_s, "", Odometer(done, total, "bytes" if total else ""))


def event(number: int, time_s: float) -> EventRecord:
    return EventRecord("steps", number, time_s, STEP, (number, 2, 30, 4000, 0))


def box(rank: int, **values: object) -> Box:
    fields = {
        "role": "rank",
        "rank": rank,
        "run_id": "run-1",
        "pid": 100 + rank,
        "start_ticks": 7,
        "made_wall_s": WALL_S,
        "made_monotonic_s": 50.0,
        "phases": (phase(1, "spawn", 50.0),),
        "step": 0,
        "running": 0,
        "waiting": 0,
        "pages_used": 0,
        "entered": Collective("", 0),
        "left": Collective("", 0),
        "events": (),
        "notes": (),
    }
    return Box(**(fields | values))  # type: ignore[arg-type]


def merged(*boxes: Box, alive: frozenset[int] = frozenset(), max_events: int = 40) -> Timeline:
    named = {f"rank-{one.rank}": one for one in boxes}
    return merge(named, lambda pid, ticks: pid in alive and ticks == 7, 60.0, max_events)


def test_entries_of_all_processes_stand_in_the_order_of_time() -> None:
    first = box(0, phases=(phase(1, "spawn", 50.0), phase(2, "weights", 53.0)), events=(event(1, 54.0),))
    second = box(1, phases=(phase(1, "spawn", 50.5), phase(2, "weights", 53.5)))
    timeline = merged(first, second)
    assert [(entry.process, entry.since_s) for entry in timeline.entries] == [
        ("rank-0", 0.0),
        ("rank-1", 0.5),
        ("rank-0", 3.0),
        ("rank-1", 3.5),
        ("rank-0", 4.0),
    ]
    assert timeline.entries[-1].time_s == WALL_S + 4.0


def test_a_wall_clock_that_was_set_between_two_boxes_changes_no_order() -> None:
    late = box(1, made_monotonic_s=51.0, made_wall_s=WALL_S - 3600, phases=(phase(1, "spawn", 51.0),))
    timeline = merged(box(0), late)
    assert [entry.time_s - timeline.start_s for entry in timeline.entries] == [0.0, 1.0]


def test_a_phase_tells_how_the_one_before_ended() -> None:
    entries = merged(
        box(0, phases=(phase(1, "weights", 50.0, 400, 400), phase(2, "kv", 52.5, 10, 90)))
    ).entries
    assert isinstance(entries[0], PhaseEntry)
    assert isinstance(entries[1], PhaseEntry)
    assert entries[0].before is None
    assert entries[1].before == EndedPhase("weights", 2.5, Odometer(400, 400, "bytes"))


def test_alive_means_the_same_process_and_not_one_with_its_number() -> None:
    boxes = (box(0), box(1, start_ticks=8), box(2), box(3, pid=0))
    timeline = merged(*boxes, alive=frozenset({100, 101}))
    assert [process.state for process in timeline.processes] == ["alive", "dead", "dead", "never ran"]
    assert [process.phase_s for process in timeline.processes] == [10.0, None, None, None]


@pytest.mark.parametrize(("wanted", "shown"), [(0, []), (2, [2, 3]), (9, [1, 2, 3])])
def test_only_the_latest_events_are_shown(wanted: int, shown: list[int]) -> None:
    events = tuple(event(number, 50.0 + number) for number in (1, 2, 3))
    timeline = merged(box(0, events=events), max_events=wanted)
    assert [entry.number for entry in timeline.entries if isinstance(entry, EventEntry)] == shown
    assert timeline.events_left_out == 3 - len(shown)


def test_values_have_the_names_of_their_event() -> None:
    assert named_values(STEP, (4, 2, 30, 900, 0)) == {
        "number": 4,
        "sequences": 2,
        "tokens": 30,
        "took_us": 900,
    }
    assert named_values("another", (4, 0, 6, 0, 0)) == {"a": 4, "b": 0, "c": 6}
    assert named_values("bare", (0, 0, 0, 0, 0)) == {}


def test_boxes_on_disk(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    for name, rank in (("rank-0", 0), ("api", None)):
        create_box(box_path(tmp_path, name), role=name.partition("-")[0], rank=rank, run_id="r")
    writer = BlackBox(box_path(tmp_path, "rank-0"))
    writer.claim()
    writer.enter_phase("weights", 1000, "bytes")
    writer.advance(400)
    writer.set(Counter.WAITING, 5)
    writer.enter_collective(writer.name("broadcast plan"), 9)
    box_path(tmp_path, "rank-1").write_bytes(b"half")
    timeline = read_timeline(tmp_path, 40)
    assert [(one.name, one.pid, one.state) for one in timeline.processes] == [
        ("api", None, "never ran"),
        ("rank-0", os.getpid(), "alive"),
    ]
    assert set(timeline.unreadable) == {"rank-1"}
    text = "\n".join(text_of(timeline))
    assert "weights 400 B of 1.0 KB" in text
    assert "broadcast plan 9" in text
    assert "has not the size of a black box" in text
    assert "enters weights" in text


def test_the_text_says_where_a_writer_was_lost_and_hides_no_control_character() -> None:
    lost = box(0, notes=("the writer died or was stopped inside phase 2",), role="ra\x1b[31mnk")
    lines = text_of(merged(lost))
    assert "rank-0: the writer died or was stopped inside phase 2" in lines
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_directory_without_boxes_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=name):
        read_timeline(tmp_path / name, 40)
