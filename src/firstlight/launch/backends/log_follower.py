"""Follows a foreign engine by what it prints, and writes it into black boxes as if the engine had.

Lines come from the threads that drain the output; everything else happens in the supervisor's thread.
Invariant: that the engine listens is seen by connecting to it, not by a line that another version may word
differently.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from firstlight.base.blackbox.reader import Box
from firstlight.base.blackbox.store import boxes_of
from firstlight.base.config import RunConfig
from firstlight.base.errors import EngineError
from firstlight.base.failure import Failure
from firstlight.base.phases import READY, SPAWN
from firstlight.base.proc_stat import read_proc_stat
from firstlight.base.process import ExitCause
from firstlight.doctor.case.target import Engine, Role, Target, TargetProcess
from firstlight.doctor.logs.grammar import Grammar
from firstlight.doctor.logs.grammar_reader import GrammarReader, PhaseEvent
from firstlight.doctor.motion.states import Thresholds
from firstlight.doctor.servers.discover import target_below
from firstlight.doctor.servers.options import Sizes
from firstlight.launch.backends.protocol import Lost
from firstlight.launch.backends.rank_boxes import RankBoxes
from firstlight.launch.janitor import members, read_stat
from firstlight.launch.processes.commands import API, rank_name, run_id, title
from firstlight.launch.processes.output import OutputLine
from firstlight.launch.timeline.progress import BoxFollower, ProgressLine
from firstlight.serve.foreign.upstream import Place

CORE = "engine"  # the process between the HTTP server and the ranks, where there is one
_KNOCK_S = 0.25
_CENSUS_S = 1.0
_TELL_S = 1.0
_TAKES_NOTE_S = 5.0
_EXIT_STATUS = 49  # of /proc/PID/stat, behind the name: field 52
_SPIN_FACTOR = 3.0  # times the longest usual silence
_DEADLINE_S = 3.0
_PAUSE_S = 0.02


class LogFollower:
    """See `protocol.Follower`. The engine's first process is called by the engine's name."""

    def __init__(self, config: RunConfig, grammar: Grammar, sizes: Sizes, place: Place) -> None:
        self._config = config
        self._grammar = grammar
        self._place = place
        self._name = grammar.engine
        self._ranks = tuple(rank_name(rank) for rank in range(sizes.ranks_here))
        self._reader = GrammarReader(grammar, sizes)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._boxes = RankBoxes(Path(config.run_dir), run_id(config), (self._name, *self._ranks))
        self._paths = boxes_of(Path(config.run_dir))
        self._progress = BoxFollower(self._paths)
        self._pids: dict[str, int] = {}
        self._named: dict[int, int] = {}
        self._leaders: set[int] = set()
        self._vital: dict[str, tuple[int, int]] = {}  # pid and start, as they were when it began to listen
        self._gone_since_s: dict[str, float] = {}
        self._latest: dict[str, ProgressLine] = {}
        self._knocked_s = self._counted_s = self._told_s = 0.0
        self._is_listening = False

    def started(self, name: str, pid: int) -> None:
        """The engine's interpreter begins with its imports."""
        self._pids[name] = pid
        if name == self._name:
            self._remember(pid)
            self._boxes.claim(name, pid)
            self._boxes.report(name, "imports")
            self._tell_silent_ranks("imports")

    def output(self, name: str, line: OutputLine) -> None:
        """A line of the engine waits for the next `read`."""
        if name == self._name:
            self._lines.put(line.text)

    def read(self, now_s: float) -> list[ProgressLine]:
        """Reads the new lines, and looks once a second who runs until the engine listens."""
        self._read_lines()
        if now_s - self._counted_s >= _CENSUS_S and not self._is_listening:
            self._counted_s = now_s
            self._find_processes()
        self._boxes.follow_api()
        if not self._is_listening and self._name in self._pids and now_s - self._knocked_s >= _KNOCK_S:
            self._knocked_s = now_s
            self._is_listening = _accepts(self._place)
            if self._is_listening:  # the last look: nobody joins an engine that serves
                self._find_processes()
        return self._with_silent_ones(self._progress.read(now_s), now_s)

    def can_answer(self, lines: Sequence[ProgressLine]) -> bool:
        """It listens."""
        return self._is_listening

    def answered(self) -> None:
        """Only now is it ready, whatever its log says."""
        for name in self._boxes.names:
            self._boxes.report(name, READY)

    def ended(self, name: str) -> None:
        """What the engine's first process has left behind goes too; its lines are read to the end."""
        pid = self._pids.pop(name, None)
        if name == self._name and pid is not None:
            self._read_lines()
            end_leftovers(run_id(self._config), self._named, self._leaders, set(self._pids.values()))

    def lost(self, now_s: float) -> Sequence[Lost]:
        """Ranks of an engine that listens. For some seconds it may take note itself, and say why."""
        if self._name not in self._pids:
            return ()
        for name, known in self._vital.items():
            if not _lives(*known):
                self._gone_since_s.setdefault(name, now_s)
        late = [name for name, since_s in self._gone_since_s.items() if now_s - since_s >= _TAKES_NOTE_S]
        gone = [(name, self._vital.pop(name)[0]) for name in late]
        self._gone_since_s = {name: s for name, s in self._gone_since_s.items() if name in self._vital}
        return [Lost(name, pid, _cause_of_zombie(pid)) for name, pid in gone]

    def last_words(self, name: str) -> Failure | None:
        """The line that says why, which is seldom the last one."""
        cause = self._reader.root_cause() if name == self._name else None
        if cause is None:
            return None
        rank = cause.speaker.rank
        who = f" ({title(rank_name(rank))})" if rank is not None else ""
        hint = f"Its own log says more; options of {self._name} stand behind a --."
        return Failure(f"{self._name}{who} ended: {cause.text}", hint, EngineError.exit_code)

    def target(self) -> Target:
        """The engine's processes and the relay, called by the names of their boxes."""
        pid = self._pids.get(self._name)
        found = Target(engine=Engine(self._name), processes=())
        if pid is not None:
            found = target_below(pid, run_id(self._config))
        relay = self._relay()
        renamed = [
            self._renamed(process) for process in found.processes if relay is None or process.pid != relay.pid
        ]
        return msgspec.structs.replace(
            found,
            processes=(*renamed, *([relay] if relay else [])),
            expected_ranks=len(self._ranks),
            run_dir=self._config.run_dir,
            addresses=(),
        )

    def _renamed(self, process: TargetProcess) -> TargetProcess:
        """By the name of its box, where the engine's own names say less than we know."""
        if process.pid == self._pids.get(self._name):
            return msgspec.structs.replace(process, key=self._name)
        if process.role is not Role.RANK or process.rank is not None:
            return process
        said = {pid: rank for rank, pid in self._reader.pids.items()}
        rank = said.get(process.pid, 0 if len(self._ranks) == 1 else None)
        if rank is None:
            return process
        return msgspec.structs.replace(process, key=rank_name(rank), rank=rank)

    def thresholds(self, boxes: Mapping[str, Box]) -> Thresholds:
        """A multiple of the longest silence that is usual in the phases of now."""
        quiet_s = self._grammar.quiet_s
        phases = [box.phase.name for name, box in boxes.items() if name in self._ranks and box.phase]
        longest_s = max((quiet_s.get(phase, 60.0) for phase in phases), default=60.0)
        return Thresholds(
            spin_after_s=_SPIN_FACTOR * longest_s, spin_serving_after_s=_SPIN_FACTOR * quiet_s["serving"]
        )

    def _with_silent_ones(self, lines: list[ProgressLine], now_s: float) -> list[ProgressLine]:
        """Once a second also those where nothing moves: that time passes is news of a kind."""
        self._latest.update({line.name: line for line in lines})
        if now_s - self._told_s < _TELL_S:
            return lines
        self._told_s = now_s
        moved = {line.name for line in lines}
        silent = [line for name, line in self._latest.items() if name not in moved]
        return [*lines, *(msgspec.structs.replace(line, time_s=now_s) for line in silent)]

    def _read_lines(self) -> None:
        events: list[PhaseEvent] = []
        while not self._lines.empty():
            events += self._reader.feed(self._lines.get())
        for event in events:
            name = self._name if event.rank is None else rank_name(event.rank)
            self._boxes.report(name, event.phase, (event.done, event.total, event.unit), event.detail)
            if event.rank is None and event.is_new:
                self._tell_silent_ranks(event.phase)

    def _tell_silent_ranks(self, phase: str) -> None:
        """Ranks that are not there yet wait for the server that will start them."""
        for rank, name in enumerate(self._ranks):
            if not self._reader.cursor(rank).phase:
                self._boxes.report(name, SPAWN, detail=f"{self._name} itself is in phase {phase}")

    def _find_processes(self) -> None:
        self._vital.clear()
        for process in self.target().processes:
            self._remember(process.pid)
            if process.role is Role.ENGINE:
                self._paths[CORE] = self._boxes.add(CORE, "engine")
            if process.role in (Role.ENGINE, Role.RANK):
                self._boxes.claim(process.key, process.pid)
                if self._is_listening:
                    self._vital[process.key] = process.pid, process.start_ticks

    def _remember(self, pid: int) -> None:
        stat = read_proc_stat(pid)
        if stat is not None:
            self._named[pid] = stat.start_ticks
            if stat.session == pid:
                self._leaders.add(pid)

    def _relay(self) -> TargetProcess | None:
        pid = self._pids.get(API)
        stat = read_proc_stat(pid) if pid is not None else None
        if pid is None or stat is None:
            return None
        return TargetProcess(
            key=API, pid=pid, start_ticks=stat.start_ticks, parent=os.getpid(), session=pid, role=Role.API
        )


def _lives(pid: int, start_ticks: int) -> bool:
    stat = read_proc_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def _cause_of_zombie(pid: int) -> ExitCause:
    """How it ended, while its parent has not taken note; otherwise nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        status = int(fields[_EXIT_STATUS])
    except (OSError, IndexError, ValueError):
        return ExitCause(None)
    if fields[0] not in (b"Z", b"X"):
        return ExitCause(None)
    return ExitCause.from_returncode(os.waitstatus_to_exitcode(status))


def _accepts(place: Place) -> bool:
    """Whether somebody listens there."""
    kind = socket.AF_UNIX if place.uds else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as knocking:
        knocking.settimeout(0.1)
        return knocking.connect_ex(place.uds or ("127.0.0.1", place.port)) == 0


# What a foreign engine leaves running when it ends: found by the run's token, by session and by descent. It
# ends nothing but members of the run, and none of those that it is told to spare.


def end_leftovers(
    run_id: str, named: Mapping[int, int], leaders: Collection[int], spared: Collection[int]
) -> list[int]:
    """Kill what is left; the pids that were. `named`: pid and start ticks of known members; `leaders`: those
    of them that had opened a session.
    """
    ended: set[int] = set()
    give_up_s = time.monotonic() + _DEADLINE_S
    while True:
        living = members(run_id, dict(named), set(leaders))
        found = {pid: stat for pid, stat in living.items() if pid not in spared}
        for pid, stat in found.items():
            now = read_stat(pid)
            if now is not None and now.start_ticks == stat.start_ticks:  # its number is still its own
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                ended.add(pid)
        for pid in ended:  # orphans are ours to wait for: a zombie keeps its number
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if not found or time.monotonic() > give_up_s:
            return sorted(ended)
        time.sleep(_PAUSE_S)
