"""Reading a foreign engine's log: lines in, phase events out, with one cursor for each rank.

Pure. Invariants: a rank is somebody who speaks with its own prefix, never a second copy of a bar; a cursor
does not go back; and what no pattern knows is kept, because the line that explains a hang is often one of
those.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from firstlight.doctor.logs.grammar import Entry, Fatal, Grammar
from firstlight.doctor.servers.options import Sizes

_BAR_RANK = 0  # draws the bars that come without a prefix, in both engines
_KEPT_UNKNOWN = 200
_MAX_LINE_CHARS = 2000
_LABEL = re.compile(r"(?:^|[_ ])(?:ATTN_|MOE_)?([A-Z]+?)_?(\d+)")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b: \S")


class Speaker(msgspec.Struct, frozen=True):
    """Who prints a line. `role`: "server", "core" (for all ranks), "rank", "other", or "" if unknown."""

    role: str = ""
    rank: int | None = None
    pid: int | None = None


class PhaseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor has moved. `rank` None: the engine's HTTP server. `is_new`: it has entered the phase."""

    rank: int | None
    phase: str
    is_new: bool
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""
    pid: int | None = None


class FatalLine(msgspec.Struct, frozen=True):
    """A line of an end. `is_root`: it says why, and not only that something else has failed."""

    text: str
    is_root: bool
    speaker: Speaker


class Cursor:
    """Where one rank, or the server, is."""

    def __init__(self, order: Mapping[str, int]) -> None:
        self._order = order
        self.phase = ""
        self.odometer = (0, 0, "")
        self.detail = ""
        self.said: dict[int, int] = {}  # by entry: how often it stood at the beginning of something

    def place(self, entry: Entry, index: int, *, is_fresh: bool) -> str | None:
        """The phase that a line means here; None when it would lead back."""
        if self.phase in entry.within:
            return self.phase
        if is_fresh:
            self.said[index] = self.said.get(index, 0) + 1
        phase = entry.again if entry.again and self.said.get(index, 0) > 1 else entry.phase
        return phase if self._order[phase] >= self._order.get(self.phase, -1) else None

    def move(self, phase: str, odometer: tuple[int, int, str], detail: str) -> bool | None:
        """Whether it entered the phase; None when nothing has changed."""
        is_new = phase != self.phase
        after = (odometer, detail or ("" if is_new else self.detail))
        if not is_new and after == (self.odometer, self.detail):
            return None
        self.phase = phase
        self.odometer, self.detail = after
        return is_new


class GrammarReader:
    """Reads one engine's log. `sizes`: the groups by which labels become ranks."""

    def __init__(self, grammar: Grammar, sizes: Sizes) -> None:
        self.grammar = grammar
        self.sizes = sizes
        self.pids: dict[int, int] = {}  # of ranks that named theirs
        self.unknown: deque[str] = deque(maxlen=_KEPT_UNKNOWN)
        self.num_unknown = 0
        self.fatal: list[FatalLine] = []
        self.milestones: dict[str, set[int]] = {}
        order = grammar.order()
        self._cursors: dict[int | None, Cursor] = {None: Cursor(order)}
        self._cursors |= {rank: Cursor(order) for rank in range(sizes.ranks_here)}
        self._prefixes = [re.compile(prefix.pattern) for prefix in grammar.prefixes]
        self._entries = [(entry, re.compile(entry.pattern)) for entry in grammar.entries]
        self._fatal = [(row, re.compile(row.pattern)) for row in grammar.fatal]
        self._bars: dict[tuple[int | None, int], int] = {}  # by speaker and entry: where its bar stood

    def cursor(self, rank: int | None) -> Cursor:
        """The cursor of a rank, or with None of the server."""
        return self._cursors[rank]

    def missing(self, milestone: str) -> list[int]:
        """The ranks that have not reached a milestone that others have; empty when nobody has."""
        reached = self.milestones.get(milestone, set())
        return [rank for rank in range(self.sizes.ranks_here) if rank not in reached] if reached else []

    def feed(self, line: str) -> list[PhaseEvent]:
        """What a line, without its end, moves."""
        speaker, text = self.split(line[:_MAX_LINE_CHARS])
        self._note_fatal(speaker, text)
        for index, (entry, pattern) in enumerate(self._entries):
            if found := pattern.search(text):
                return self._moved(index, entry, found, self._with_rank(speaker, found))
        if text.strip():
            self.unknown.append(line.rstrip())
            self.num_unknown += 1
        return []

    def feed_all(self, lines: Iterable[str]) -> list[PhaseEvent]:
        """The events of several lines."""
        return [event for line in lines for event in self.feed(line)]

    def split(self, line: str) -> tuple[Speaker, str]:
        """Who speaks, and what is said; several prefixes may stand one after the other."""
        role, labels, pid = "", "", None
        for pattern in self._prefixes:
            found = pattern.match(line)
            if found is None:
                continue
            line = line[found.end() :]
            groups = found.groupdict()
            role, labels = groups.get("role") or role, groups.get("labels") or labels
            pid = int(groups["pid"]) if groups.get("pid") else pid
        return self._speaker(role, labels, pid), line

    def _speaker(self, role: str, labels: str, pid: int | None) -> Speaker:
        kind = self.grammar.roles.get(role, "other") if role else "rank" if labels else ""
        if kind != "rank":
            return Speaker(kind, self._alone() if kind == "core" else None, pid)
        places = {name: int(number) for name, number in _LABEL.findall(labels)}
        rank = self.sizes.rank_of(places)
        if rank is None and labels.strip("_-").isdigit():
            rank = int(labels.strip("_-"))
        rank = self._alone() if rank is None else rank
        return self._known(Speaker(kind, rank if rank in self._cursors else None, pid))

    def _with_rank(self, speaker: Speaker, found: re.Match[str]) -> Speaker:
        """A rank that does not name itself yet in its prefix says its number in the line."""
        rank = found.groupdict().get("rank")
        if rank is None or speaker.rank is not None or int(rank) not in self._cursors:
            return speaker
        return self._known(Speaker("rank", int(rank), speaker.pid))

    def _known(self, speaker: Speaker) -> Speaker:
        """Remembers the process of a rank, or finds the rank by its process."""
        if speaker.role != "rank" or speaker.pid is None:
            return speaker
        if speaker.rank is not None:
            self.pids[speaker.rank] = speaker.pid
            return speaker
        rank = next((rank for rank, pid in self.pids.items() if pid == speaker.pid), None)
        return Speaker(speaker.role, rank, speaker.pid)

    def _alone(self) -> int | None:
        """The only rank, if there is one only: the engine core speaks for it."""
        return 0 if self.sizes.ranks_here == 1 else None

    def root_cause(self) -> FatalLine | None:
        """The first line that says why the engine ends; no cascade ever is it."""
        return next((line for line in self.fatal if line.is_root), None)

    def _note_fatal(self, speaker: Speaker, text: str) -> None:
        row = self._fatal_row(text)
        if row is not None:
            self.fatal.append(FatalLine(text.strip(), row.kind == "root", speaker))
        elif _EXCEPTION.match(text.strip()):
            self.fatal.append(FatalLine(text.strip(), True, speaker))

    def _fatal_row(self, text: str) -> Fatal | None:
        return next((row for row, pattern in self._fatal if pattern.search(text)), None)

    def _moved(self, index: int, entry: Entry, found: re.Match[str], speaker: Speaker) -> list[PhaseEvent]:
        odometer = _odometer(entry, found.groupdict())
        detail = found.groupdict().get("detail") or entry.detail
        if entry.milestone and speaker.rank is not None:
            self.milestones.setdefault(entry.milestone, set()).add(speaker.rank)
        is_fresh = self._is_fresh(speaker, index, odometer)
        events = []
        for rank in self._whose(entry, speaker):
            cursor = self._cursors[rank]
            phase = cursor.place(entry, index, is_fresh=is_fresh)
            if phase is None:
                continue
            # Only who draws a bar is as far as it: the others are in the same phase, and silent.
            is_own = rank is None or rank == (_BAR_RANK if speaker.rank is None else speaker.rank)
            own = odometer if is_own else (0, 0, "")
            events += self._event(rank, phase, own, detail if is_own or not odometer[1] else "")
            if is_own and entry.full and phase == entry.phase and 0 < odometer[1] <= odometer[0]:
                events += self._event(rank, entry.full, (0, 0, ""), "")
        return events

    def _whose(self, entry: Entry, speaker: Speaker) -> list[int | None]:
        if entry.of == "server":
            return [None]
        if entry.per_rank and speaker.rank is not None:
            return [speaker.rank]
        return list(range(self.sizes.ranks_here))

    def _is_fresh(self, speaker: Speaker, index: int, odometer: tuple[int, int, str]) -> bool:
        """Whether a line begins something: any line without a bar, and a bar that starts over."""
        if not odometer[1]:
            return True
        key = speaker.rank, index
        before, self._bars[key] = self._bars.get(key), odometer[0]
        return before is None or odometer[0] < before

    def _event(
        self, rank: int | None, phase: str, odometer: tuple[int, int, str], detail: str
    ) -> list[PhaseEvent]:
        cursor = self._cursors[rank]
        is_new = cursor.move(phase, odometer, detail)
        if is_new is None:
            return []
        done, total, unit = odometer
        pid = self.pids.get(rank) if rank is not None else None
        return [
            PhaseEvent(
                rank=rank,
                phase=phase,
                is_new=is_new,
                done=done,
                total=total,
                unit=unit,
                detail=cursor.detail,
                pid=pid,
            )
        ]


def _odometer(entry: Entry, groups: Mapping[str, str | None]) -> tuple[int, int, str]:
    done, total = groups.get("done"), groups.get("total")
    if done and total:
        return int(done), int(total), entry.unit
    if percent := groups.get("percent"):
        return int(percent), 100, "%"
    return (int(done), 0, entry.unit) if done else (0, 0, "")
