"""Reading a black box while its process runs, hangs, or is long dead.

It maps the file for reading only and never makes the writer wait. A record that is being written is read
again a bounded number of times; then it is left out, and a note says that the writer died or was stopped
inside it. Invariant: every record returned was whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.blackbox.layout import (
    EVENT_BYTES,
    FILE_BYTES,
    MAGIC,
    NAME_BYTES,
    NO_RANK,
    NUM_NAMES,
    NUM_PHASES,
    NUM_RINGS,
    NUMBER_BITS,
    PHASE_BYTES,
    PHASE_WORDS,
    RING_EVENTS,
    RING_HEADER_BYTES,
    ROLE_BYTES,
    ROLE_OFFSET,
    RUN_BYTES,
    RUN_OFFSET,
    WORD,
    Counter,
    Header,
    counter_word,
    name_offset,
    phase_offset,
    ring_offset,
    unpack_text,
)

_TRIES = 5
_PAUSE_S = 0.0002
_EVENT = struct.Struct("8Q")
_PHASE_HEAD = struct.Struct(f"={PHASE_WORDS}Q")


class NotABox(ValueError):
    """The file is missing, too short, or no black box of this version."""


class Odometer(msgspec.Struct, frozen=True):
    """How far a phase is. `total` 0: not known."""

    done: int = 0
    total: int = 0
    unit: str = ""


class PhaseRecord(msgspec.Struct, frozen=True):
    """One phase, from `start_s` on CLOCK_MONOTONIC to the start of the next one."""

    number: int
    name: str
    start_s: float
    detail: str
    odometer: Odometer


class Collective(msgspec.Struct, frozen=True):
    """One collective by name and number; number 0: none yet."""

    name: str
    number: int


class Place(msgspec.Struct, frozen=True):
    """The operator that a recorded step is in, and its layer from one on (0: none); no name: in none."""

    name: str
    layer: int


NO_PLACE = Place("", 0)


class EventRecord(msgspec.Struct, frozen=True):
    """One event of a ring. `number` counts the events of that ring from one."""

    ring: str
    number: int
    time_s: float
    name: str
    values: tuple[int, ...]


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a box holds at one moment. `pid` 0: its process has not claimed it."""

    role: str
    rank: int | None
    run_id: str
    pid: int
    start_ticks: int
    made_wall_s: float
    made_monotonic_s: float
    phases: tuple[PhaseRecord, ...]
    step: int
    running: int
    waiting: int
    pages_used: int
    entered: Collective
    left: Collective
    events: tuple[EventRecord, ...]
    notes: tuple[str, ...]
    operator: Place = NO_PLACE

    @property
    def phase(self) -> PhaseRecord | None:
        """The phase it is in, or was in at its end."""
        return self.phases[-1] if self.phases else None

    def wall_s(self, monotonic_s: float) -> float:
        """A moment of this box as seconds since 1970."""
        return self.made_wall_s + monotonic_s - self.made_monotonic_s


def read_box(path: Path, *, with_events: bool = True) -> Box:
    """What the box holds now. Raises `NotABox`."""
    with _mapped(path) as memory, memoryview(memory).cast("Q") as words:
        return _Reading(memory, words).box(with_events)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotABox(f"{path}: {error.strerror}") from error
    try:
        if os.fstat(fd).st_size != FILE_BYTES:  # mapping less would be a SIGBUS later
            raise NotABox(f"{path} has not the size of a black box")
        memory = mmap.mmap(fd, FILE_BYTES, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with memory:
        with memoryview(memory).cast("Q") as words:
            if words[Header.MAGIC] != MAGIC:
                raise NotABox(f"{path} is no black box of this version")
        yield memory


class _Reading:
    """One pass over a mapped box."""

    def __init__(self, memory: mmap.mmap, words: memoryview[int]) -> None:
        self._memory = memory
        self._words = words
        self._notes: list[str] = []

    def box(self, with_events: bool) -> Box:
        words = self._words
        phases = self._phases()  # before the names: a record's name was written before it
        events = tuple(self._events()) if with_events else ()
        rank = words[Header.RANK]
        for counted, what in ((Header.PHASES_DROPPED, "phases"), (Header.NAMES_DROPPED, "names")):
            if words[counted]:
                self._notes.append(f"{words[counted]} {what} found no room")
        return Box(
            role=self._text(ROLE_OFFSET, ROLE_BYTES),
            rank=None if rank == NO_RANK else rank,
            run_id=self._text(RUN_OFFSET, RUN_BYTES),
            pid=words[Header.PID],
            start_ticks=words[Header.START_TICKS],
            made_wall_s=words[Header.MADE_WALL_NS] / 1e9,
            made_monotonic_s=words[Header.MADE_MONOTONIC_NS] / 1e9,
            phases=phases,
            step=words[counter_word(Counter.STEP)],
            running=words[counter_word(Counter.RUNNING)],
            waiting=words[counter_word(Counter.WAITING)],
            pages_used=words[counter_word(Counter.PAGES_USED)],
            entered=Collective(*self._named(Counter.ENTERED)),
            left=Collective(*self._named(Counter.LEFT)),
            operator=Place(*self._named(Counter.OPERATOR)),
            events=events,
            notes=tuple(self._notes),
        )

    def _phases(self) -> tuple[PhaseRecord, ...]:
        found: list[tuple[int, float, int, Odometer, str]] = []
        for index in range(NUM_PHASES):
            offset = phase_offset(index)
            data = self._record(offset, PHASE_BYTES, index + 1, f"phase {index + 1}")
            if data is None:
                break
            _, time_ns, name, done, total, unit = _PHASE_HEAD.unpack_from(data)
            before = Odometer(done, total, self._name(unit))
            found.append((index + 1, time_ns / 1e9, name, before, unpack_text(data[_PHASE_HEAD.size :])))
        current = self._odometer(len(found))
        odometers = [*(before for _, _, _, before, _ in found[1:]), current]
        return tuple(
            PhaseRecord(number, self._name(name), start_s, detail, odometer)
            for (number, start_s, name, _, detail), odometer in zip(found, odometers, strict=False)
        )

    def _odometer(self, phase: int) -> Odometer:
        """The odometer if it belongs to `phase`; an empty one while it is being reset."""
        words, base = self._words, counter_word(Counter.STEP)
        for _ in range(_TRIES):
            before = words[base + Counter.PHASE]
            value = words[base + Counter.DONE], words[base + Counter.TOTAL], words[base + Counter.UNIT]
            if before == words[base + Counter.PHASE] == phase:
                return Odometer(value[0], value[1], self._name(value[2]))
            time.sleep(_PAUSE_S)
        return Odometer()

    def _named(self, counter: Counter) -> tuple[str, int]:
        word = self._words[counter_word(counter)]
        return (self._name(word >> NUMBER_BITS), word & (1 << NUMBER_BITS) - 1)

    def _events(self) -> Iterator[EventRecord]:
        for ring in range(NUM_RINGS):
            offset = ring_offset(ring)
            title = self._name(self._words[offset // WORD])
            if title:
                yield from sorted(
                    self._ring(offset + RING_HEADER_BYTES, title), key=lambda event: event.number
                )

    def _ring(self, offset: int, title: str) -> Iterator[EventRecord]:
        for index in range(RING_EVENTS):
            data = self._record(offset + index * EVENT_BYTES, EVENT_BYTES, None, f"an event of {title}")
            if data is not None:
                number, time_ns, name, *values = _EVENT.unpack(data)
                yield EventRecord(title, number, time_ns / 1e9, self._name(name), tuple(values))

    def _record(self, offset: int, size: int, commit: int | None, what: str) -> bytes | None:
        """The record's bytes if it is committed (as `commit`, if given); None if not."""
        word = offset // WORD
        for attempt in range(_TRIES):
            before = self._words[word]
            data = bytes(self._memory[offset : offset + size])
            # A second look, as some processors may show another one's stores in another order for a moment.
            is_whole = data == self._memory[offset : offset + size] and before == self._words[word]
            if before and is_whole:
                return data if commit is None or before == commit else None
            if not before and not any(data):
                return None  # never written
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE_S)
        self._notes.append(f"the writer died or was stopped inside {what}")
        return None

    def _name(self, number: int) -> str:
        if not 0 < number <= NUM_NAMES:
            return ""
        offset = name_offset(number - 1)
        return self._text(offset + WORD, NAME_BYTES - WORD) if self._words[offset // WORD] == number else ""

    def _text(self, offset: int, size: int) -> str:
        return unpack_text(bytes(self._memory[offset : offset + size]))
