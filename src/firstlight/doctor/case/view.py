"""A case as the hypotheses see it: motion and waits judged once, and look-ups that many of them need.

Pure. Invariant: whatever is returned comes with the id of the evidence it stands in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from firstlight.doctor.case.evidence import Case, Seen
from firstlight.doctor.case.target import Role
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    Environment,
    Frame,
    LogTail,
    PythonStacks,
    StackThread,
    Threads,
    ThreadState,
)
from firstlight.doctor.logs.grammar import ENGINES, load_grammar, places_of
from firstlight.doctor.logs.grammar_reader import GrammarReader
from firstlight.doctor.motion.motion import ProcessMotion, ServerMotion, State, Thresholds, judge_motion
from firstlight.doctor.motion.states import FATAL
from firstlight.doctor.motion.waits import WaitGraph, wait_graph
from firstlight.doctor.servers.options import sizes


@dataclass(frozen=True)
class Line:
    """A line of a log."""

    text: str
    subject: str
    evidence: str


@dataclass(frozen=True)
class Place:
    """A thread of a process and the frame in which it was found."""

    key: str
    thread: StackThread
    frame: Frame
    evidence: str


@dataclass(frozen=True)
class View:
    """One case, judged."""

    case: Case
    motion: ServerMotion
    graph: WaitGraph

    @functools.cached_property
    def lines(self) -> tuple[Line, ...]:
        """All log lines of the latest look, in the order of the files."""
        found = []
        for seen in self.case.all(LogTail, look=self._last_look_of_logs):
            found += [Line(line, seen.subject, seen.id) for line in seen.value.lines]
        return tuple(found)

    @property
    def _last_look_of_logs(self) -> int:
        return max((seen.evidence.look for seen in self.case.all(LogTail)), default=0)

    def find_line(self, *patterns: str) -> Line | None:
        """The last line that one of these regular expressions is found in."""
        wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        return next((line for line in reversed(self.lines) if wanted.search(line.text)), None)

    def is_followed(self, line: Line, *patterns: str) -> bool:
        """Whether a line that matches comes after `line` in its log."""
        wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        log = [other for other in self.lines if other.evidence == line.evidence]
        return any(wanted.search(other.text) for other in log[log.index(line) + 1 :])

    def variable(self, *names: str) -> Iterator[tuple[str, str, str]]:
        """(name, value, evidence id) of each of these variables, once for each process that has it."""
        for seen in self.case.all(Environment):
            for name in names:
                if name in seen.value.variables:
                    yield name, seen.value.variables[name], seen.id

    def in_stack(
        self, *patterns: str, keys: Iterable[str] | None = None, innermost: int = 40
    ) -> Iterator[Place]:
        """Threads with a frame `file:function` that one of these patterns is found in, by the latest look."""
        wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        chosen = set(keys) if keys is not None else None
        for seen in self._stacks:
            for thread in seen.value.threads if chosen is None or seen.subject in chosen else ():
                frames = thread.frames[:innermost]
                frame = next((one for one in frames if wanted.search(f"{one.file}:{one.function}")), None)
                if frame is not None:
                    yield Place(seen.subject, thread, frame, seen.id)

    @functools.cached_property
    def _stacks(self) -> tuple[Seen[PythonStacks], ...]:
        found = (self.case.seen(PythonStacks, key) for key in self.case.subjects)
        return tuple(seen for seen in found if seen is not None)

    def threads(self, key: str) -> tuple[Seen[Threads], Mapping[int, ThreadState]] | None:
        """The threads of the latest look by number."""
        seen = self.case.seen(Threads, key)
        return (seen, {thread.tid: thread for thread in seen.value.threads}) if seen else None

    def main_thread(self, key: str) -> tuple[Seen[Threads], ThreadState] | None:
        """The main thread of a process by the latest look."""
        process, found = self.case.target.process(key), self.threads(key)
        if process is None or found is None or process.pid not in found[1]:
            return None
        return found[0], found[1][process.pid]

    @property
    def has_stopped_moving(self) -> bool:
        """Whether two looks say that nothing of the server moves, and that something should."""
        return self.motion.state in (State.BLOCKED, State.SPINNING, *FATAL)

    @property
    def is_starting(self) -> bool:
        """Not up yet, as far as anything tells."""
        return not self.motion.serving.is_up

    @property
    def ranks(self) -> tuple[ProcessMotion, ...]:
        """The motions of all ranks that are known of."""
        return tuple(motion for motion in self.motion.processes if motion.role is Role.RANK)

    @property
    def workers(self) -> tuple[ProcessMotion, ...]:
        """Those that a server cannot do without, watchers left out."""
        roles = (Role.API, Role.ENGINE, Role.RANK, Role.DETOKENIZER, Role.LAUNCHER)
        return tuple(motion for motion in self.motion.processes if motion.role in roles) or (
            self.motion.processes
        )

    def box(self, key: str) -> Seen[BlackBoxSeen] | None:
        """The black box of a process by the latest look."""
        return self.case.seen(BlackBoxSeen, key)

    def phase(self, key: str) -> str:
        """The phase a process is in, or was in last; empty when nothing tells."""
        seen = self.box(key)
        if seen is not None:
            return seen.value.box.phase.name if seen.value.box.phase else ""
        process = self.case.target.process(key)
        rank = process.rank if process else None
        if self.log is None or rank is None or rank >= self.log[0].sizes.ranks_here:
            return ""
        return self.log[0].cursor(rank).phase

    def place(self, key: str) -> int | None:
        """How far it is, as a number that grows from phase to phase; None where that is not known."""
        return self.places.get(self.phase(key))

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """The order of the phases of this engine's start."""
        return places_of(self.case.target.engine.value)

    @functools.cached_property
    def log(self) -> tuple[GrammarReader, Seen[LogTail]] | None:
        """What a foreign engine's log says of each rank."""
        return read_log(self.case)

    def pid(self, key: str) -> int | None:
        """Its number; also of one that only left a black box."""
        process, seen = self.case.target.process(key), self.box(key)
        return process.pid if process else seen.value.box.pid or None if seen else None

    @functools.cached_property
    def suspect(self) -> ProcessMotion | None:
        """Who is dead or stopped; else whom others wait for and who waits for nobody; else who is stuck."""
        fatal = [motion for motion in self.workers if motion.state in FATAL]
        if fatal:
            return fatal[0]
        stuck = [motion for motion in self.workers if motion.state in (State.SPINNING, State.BLOCKED)]
        for key in self.graph.sinks:
            found = next((one for one in stuck if one.key == key), None)
            if found is not None and self.graph.waiters_of(key):
                return found
        return min(stuck, key=lambda one: one.role is not Role.RANK, default=None)


def view_of(
    case: Case, thresholds: Thresholds | None = None, quiet_s: Mapping[str, float] | None = None
) -> View:
    """Judge motion and waits of a case."""
    return View(case, judge_motion(case, thresholds, quiet_s), wait_graph(case))


# Where a foreign engine's ranks are by what its log says, one cursor for each rank. Ranks are compared only
# in a log that is there from its first line: in the end of a long one, the lines of some ranks may merely
# have been cut off.


def read_log(case: Case) -> tuple[GrammarReader, Seen[LogTail]] | None:
    """The reader after the longest whole log of the latest look; None for our own engine, or without one."""
    engine = case.target.engine
    logs = [seen for seen in case.all(LogTail) if _is_whole(seen.value)]
    if engine.value not in ENGINES or not logs:
        return None
    seen = max(logs, key=lambda one: (one.evidence.look, one.value.size_bytes))
    command = next((p.command for p in case.target.processes if len(p.command) > 1), ())
    reader = GrammarReader(load_grammar(engine.value), sizes(engine, command))
    reader.feed_all(seen.value.lines)
    return reader, seen


def _is_whole(log: LogTail) -> bool:
    """Line ends and empty lines are not kept, so a whole log has a little less than its size."""
    kept = sum(len(line.encode()) + 1 for line in log.lines)
    return bool(log.lines) and kept >= log.size_bytes * 0.8
