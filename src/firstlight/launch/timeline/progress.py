"""How far each process is: read from the black boxes, with rates and remaining times.

Invariant: no phase is missed, however short it was, and each is handed out with its last odometer before the
next one begins.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from firstlight.base.blackbox.reader import Box, NotABox, PhaseRecord, read_box

_WINDOW_S = 5.0  # a rate is that of the last seconds: what went before says little about a full page cache


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where one process is at `time_s` on CLOCK_MONOTONIC."""

    time_s: float
    name: str  # "rank-0", "api"
    rank: int | None = None
    phase: str
    start_s: float  # when it entered the phase
    done: int = 0
    total: int = 0  # 0: not known
    unit: str = ""  # "bytes", "layers", "shapes", …
    detail: str = ""


class BoxFollower:
    """Follows the boxes of one run."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._seen: dict[str, PhaseRecord] = {}

    def read(self, now_s: float) -> list[ProgressLine]:
        """What has changed since the last call."""
        lines: list[ProgressLine] = []
        for name, path in self._paths.items():
            try:
                box = read_box(path, with_events=False)
            except NotABox:
                continue
            lines += self._changes(name, box, now_s)
        return lines

    def _changes(self, name: str, box: Box, now_s: float) -> list[ProgressLine]:
        seen = self._seen.get(name)
        first = max(seen.number - 1, 0) if seen else 0
        lines = []
        for phase, after in zip(box.phases[first:], [*box.phases[first + 1 :], None], strict=False):
            if phase != seen:
                lines.append(_line(name, box, phase, after.start_s if after else now_s))
        if box.phases:
            self._seen[name] = box.phases[-1]
        return lines


def _line(name: str, box: Box, phase: PhaseRecord, time_s: float) -> ProgressLine:
    return ProgressLine(
        time_s=time_s,
        name=name,
        rank=box.rank,
        phase=phase.name,
        start_s=phase.start_s,
        done=phase.odometer.done,
        total=phase.odometer.total,
        unit=phase.odometer.unit,
        detail=phase.detail,
    )


class Pace(msgspec.Struct, frozen=True):
    """How fast a phase advances, in its own unit. None: not known yet."""

    per_s: float | None
    remaining_s: float | None


class PhaseTrack(msgspec.Struct, frozen=True):
    """A phase of one process: its latest line, and some of the last seconds."""

    last: ProgressLine
    earlier: tuple[ProgressLine, ...] = ()
    moved_s: float | None = None  # when it was last seen to advance

    def goes_on(self, line: ProgressLine) -> bool:
        """Whether a line is of this very phase: two may begin at one moment, and one may come twice."""
        return (self.last.phase, self.last.start_s) == (line.phase, line.start_s)

    def followed_by(self, line: ProgressLine) -> PhaseTrack:
        """This track with a newer line of the same phase."""
        recent = [one for one in (*self.earlier, self.last) if one.time_s >= line.time_s - _WINDOW_S]
        return PhaseTrack(
            line, tuple(recent[-64:]), line.time_s if line.done > self.last.done else self.moved_s
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase was entered."""
        return self.last.time_s - self.last.start_s

    @property
    def budget_s(self) -> float | None:
        """What the whole phase should take by the pace so far. Time since it last advanced does not count:
        a slow disk lengthens the budget, and a stuck process does not. None: not known.
        """
        done, moved_s = self.last.done, self.moved_s or self.last.time_s
        if not done or not self.last.total or moved_s <= self.last.start_s:
            return None
        return (moved_s - self.last.start_s) * self.last.total / done

    @property
    def pace(self) -> Pace:
        """The rate of the last seconds; of the whole phase while it is younger."""
        since_s, before = self.last.start_s, 0
        if self.earlier and self.last.time_s - since_s > _WINDOW_S:
            since_s, before = self.earlier[0].time_s, self.earlier[0].done
        gained, took_s = self.last.done - before, self.last.time_s - since_s
        if gained <= 0 or took_s <= 0:
            return Pace(None, None)
        per_s = gained / took_s
        left = self.last.total - self.last.done
        return Pace(per_s, left / per_s if left >= 0 and self.last.total else None)
