"""The black boxes of a run as one timeline: what each process entered and did, in the order of time.

Pure but for `read_timeline`, which reads the boxes and looks at /proc. Invariant: all times are of one clock,
the monotonic one that the processes of a machine share, and are turned into Unix time by one and the same
box, so that no difference is a clock's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from firstlight.base.blackbox.events import named_values
from firstlight.base.blackbox.reader import Box, Collective, NotABox, Odometer, read_box
from firstlight.base.blackbox.store import boxes_of
from firstlight.base.errors import UsageError
from firstlight.base.process import start_ticks

ALIVE, DEAD, NEVER_RAN = "alive", "dead", "never ran"


class ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One process as its box shows it now, or showed it at its end.

    `state`: "alive" if a process with this very number and start time exists, "dead", or "never ran" if it
    wrote nothing itself. `last_record_s`: Unix time of the last phase or event; counters carry no time.
    """

    name: str
    role: str
    rank: int | None
    pid: int | None
    state: str
    phase: str | None
    phase_s: float | None  # seconds in it; None when its process is not alive
    odometer: Odometer
    step: int
    running: int
    waiting: int
    pages_used: int
    entered: Collective
    left: Collective
    last_record_s: float | None
    notes: tuple[str, ...]


class EndedPhase(msgspec.Struct, frozen=True):
    """The phase that ended when the next one was entered, with its last odometer."""

    phase: str
    duration_s: float
    odometer: Odometer


class PhaseEntry(msgspec.Struct, frozen=True, kw_only=True, tag="phase", tag_field="kind"):
    """A process entered a phase. `time_s`: Unix time; `since_s`: seconds since the first entry."""

    time_s: float
    since_s: float
    process: str
    phase: str
    detail: str
    before: EndedPhase | None


class EventEntry(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """A process wrote an event into one of its rings."""

    time_s: float
    since_s: float
    process: str
    ring: str
    number: int
    event: str
    values: dict[str, int]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the boxes of a run hold, merged. `events_left_out`: older ones that were not asked for."""

    run_id: str
    run_dir: str
    start_s: float  # Unix time of the first entry
    read_s: float
    processes: tuple[ProcessLine, ...]
    entries: tuple[PhaseEntry | EventEntry, ...]
    events_left_out: int
    unreadable: dict[str, str]  # boxes by name, and why


def read_timeline(run_dir: Path, max_events: int) -> Timeline:
    """The timeline of a run that goes on or is over; writers are not disturbed.

    Raises `UsageError` for a directory without boxes.
    """
    paths = boxes_of(run_dir)
    if not paths:
        what = "holds no black boxes" if run_dir.is_dir() else "is not a directory"
        raise UsageError(
            f"{run_dir} {what}.",
            "Give the run directory of a `firstlight serve`; without one, your running server is shown.",
        )
    boxes, unreadable = {}, {}
    for name, path in paths.items():
        try:
            boxes[name] = read_box(path)
        except NotABox as error:
            unreadable[name] = str(error)
    if not boxes:
        raise UsageError(f"no black box can be read: {'; '.join(unreadable.values())}.", "Is it a copy?")
    timeline = merge(boxes, _is_alive, time.monotonic(), max_events)
    return msgspec.structs.replace(timeline, run_dir=str(run_dir), unreadable=unreadable)


def merge(
    boxes: Mapping[str, Box], is_alive: Callable[[int, int], bool], now_s: float, max_events: int
) -> Timeline:
    """The timeline of at least one box. `is_alive` takes pid and start ticks; `now_s`: CLOCK_MONOTONIC."""
    clock = min(boxes.values(), key=lambda box: box.made_monotonic_s)
    firsts = [box.phases[0].start_s for box in boxes.values() if box.phases]
    start_s = min(firsts, default=clock.made_monotonic_s)
    merger = _Merger(clock, start_s)
    phases = [entry for name, box in boxes.items() for entry in merger.phases(name, box)]
    events = [entry for name, box in boxes.items() for entry in merger.events(name, box)]
    events.sort(key=_order)
    shown = events[len(events) - min(max_events, len(events)) :]
    return Timeline(
        run_id=clock.run_id,
        run_dir="",
        start_s=clock.wall_s(start_s),
        read_s=clock.wall_s(now_s),
        processes=tuple(merger.process(name, box, is_alive, now_s) for name, box in boxes.items()),
        entries=tuple(sorted([*phases, *shown], key=_order)),
        events_left_out=len(events) - len(shown),
        unreadable={},
    )


class _Merger:
    """One clock for all boxes: that of `clock`, with `start_s` as its zero."""

    def __init__(self, clock: Box, start_s: float) -> None:
        self._clock, self._start_s = clock, start_s

    def phases(self, name: str, box: Box) -> Iterator[PhaseEntry]:
        ended: EndedPhase | None = None
        for phase, after in zip(box.phases, (*box.phases[1:], None), strict=False):
            yield PhaseEntry(
                time_s=self._clock.wall_s(phase.start_s),
                since_s=phase.start_s - self._start_s,
                process=name,
                phase=phase.name,
                detail=phase.detail,
                before=ended,
            )
            if after is not None:
                ended = EndedPhase(phase.name, after.start_s - phase.start_s, phase.odometer)

    def events(self, name: str, box: Box) -> Iterator[EventEntry]:
        for event in box.events:
            yield EventEntry(
                time_s=self._clock.wall_s(event.time_s),
                since_s=event.time_s - self._start_s,
                process=name,
                ring=event.ring,
                number=event.number,
                event=event.name,
                values=named_values(event.name, event.values),
            )

    def process(self, name: str, box: Box, is_alive: Callable[[int, int], bool], now_s: float) -> ProcessLine:
        state = NEVER_RAN if not box.pid else ALIVE if is_alive(box.pid, box.start_ticks) else DEAD
        phase = box.phase
        times = [event.time_s for event in box.events] + [phase.start_s for phase in box.phases]
        return ProcessLine(
            name=name,
            role=box.role,
            rank=box.rank,
            pid=box.pid or None,
            state=state,
            phase=phase.name if phase else None,
            phase_s=now_s - phase.start_s if phase and state == ALIVE else None,
            odometer=phase.odometer if phase else Odometer(),
            step=box.step,
            running=box.running,
            waiting=box.waiting,
            pages_used=box.pages_used,
            entered=box.entered,
            left=box.left,
            last_record_s=self._clock.wall_s(max(times)) if times else None,
            notes=box.notes,
        )


def _order(entry: PhaseEntry | EventEntry) -> float:
    return entry.since_s


def _is_alive(pid: int, ticks: int) -> bool:
    return start_ticks(pid) == ticks
