"""What a person sees of a start: one line a phase, a live view on a terminal, and the card when it is ready.

Written to by the supervisor only. Invariant: nothing here decides anything, and a stream that is not a
terminal gets whole lines only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from firstlight import __version__
from firstlight.base.config import REPORT_FILE, RunConfig
from firstlight.base.invocation import program
from firstlight.base.phases import READY, SPAWN
from firstlight.launch.terminal.amounts import amount
from firstlight.launch.terminal.ready_card import base_url, ready_card
from firstlight.launch.timeline.progress import PhaseTrack, ProgressLine

if TYPE_CHECKING:
    from firstlight.launch.terminal.live_view import LiveView

_NO_READER = (errno.EPIPE, errno.EIO)  # `2>&1 | head`; a terminal that was closed
_WORTH_A_LINE_S = 0.05
_REPEAT_S = 5.0  # how often a long phase is mentioned where no live line is possible
_REPEAT_UNCOUNTED_S = 20.0  # … and one of which only the time is known


class Console:
    """Writes to one stream, as text or as one JSON object a line.

    `start_s` is the launch on the monotonic clock that progress lines use.
    """

    def __init__(
        self, stream: TextIO, start_s: float, num_ranks: int, has_keys: bool, *, as_json: bool = False
    ) -> None:
        self._stream = stream
        self._start_s = start_s
        self._num_ranks = num_ranks
        self._has_keys = has_keys
        self._as_json = as_json
        self._is_live = stream.isatty() and not as_json
        self._view: LiveView | None = None
        self._last_failure = ""
        self._tracks: dict[str, PhaseTrack] = {}  # of the ranks, by name
        self._mentioned: dict[str, ProgressLine] = {}  # the newest line of its phase that was said

    def begin(self, start_s: float) -> None:
        """Another attempt at the same run, begun at `start_s`."""
        self._start_s = start_s
        self._tracks.clear()
        self._mentioned.clear()

    def say(self, text: str) -> None:
        """A whole line (or several); the live view stays below it."""
        if self._as_json:
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = {"time": moment, "level": "info", "logger": "firstlight.launch", "message": text.strip()}
            self.pass_on(msgspec.json.encode(line).decode())
        else:
            self.pass_on(text)

    def pass_on(self, text: str) -> None:
        """A line that is written already as it shall be: a child's log."""
        try:
            if self._view is not None:
                self._view.say(text)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def progress(self, line: ProgressLine) -> None:
        """A rank has moved: closes the line of the phase it left, renews that of the phase it is in."""
        if line.rank is None:
            return  # the api process is quick, and its log speaks for it
        track = self._tracks.get(line.name)
        if track is not None and track.last.phase == READY:
            return  # from here on the log speaks
        if track is not None and track.goes_on(line):
            track = track.followed_by(line)
        else:
            self._leave(line.name, line.start_s)
            track = PhaseTrack(line)
            self._mentioned.pop(line.name, None)
        self._tracks[line.name] = track
        if self._is_live:
            self._show_live()
        elif line.phase == READY:
            return
        elif line.time_s - self._last_said_s(line) >= (_REPEAT_S if line.unit else _REPEAT_UNCOUNTED_S):
            self._mentioned[line.name] = line
            self.say(self._describe(track, line.time_s))

    def opening(self, config: RunConfig, runs_on: str = "") -> None:
        """The first lines: what is being started, and where it can be asked how far it is.

        `runs_on`: the foreign engine that runs the model.
        """
        engine = config.engine
        size = _counted(engine.tensor_parallel, "rank")
        if not runs_on:
            size += f" of {_counted(engine.threads, 'thread')}"
        where = f"with {runs_on}" if runs_on else f"on {engine.device}"
        self.say(f"firstlight {__version__}: {config.model.served_names[0]} {where}, {size}")
        self.say(f"listening on {config.server.uds or base_url(config.server)}; answers 503 until ready")

    def ready(self, config: RunConfig, now_s: float) -> None:
        """The server is ready: how long it took, where it is and how to talk to it."""
        self._finish_live()
        for row in _explained(Path(config.run_dir) / REPORT_FILE):
            self.say(row)
        took_s = now_s - self._start_s
        self.say(ready_card(config, took_s, has_keys=self._has_keys, program=program()))

    def failed(self, explanation: str) -> None:
        """What is wrong; the same is said once, however often it is found."""
        self._finish_live()
        if explanation != self._last_failure:
            self.say(f"error: {explanation}")
        self._last_failure = explanation

    def closing(self) -> None:
        """The run is over because somebody asked."""
        self._finish_live()
        self.say("stopped.")

    def _lose(self, error: OSError) -> None:
        """A line could not be written. The server goes on; if nobody will ever read again, quietly.

        Lines come from the threads that drain our children too: one that ended would block its child.
        """
        self._view, self._is_live = None, False
        if error.errno in _NO_READER:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _leave(self, name: str, now_s: float) -> None:
        """The phase that a rank was in is over; one that took no time and has nothing to say gets no line.

        By an engine's log alone, a phase takes no time where two of its lines are read at once.
        """
        track = self._tracks.get(name)
        if track is None:
            return
        has_to_say = track.last.total or (track.last.detail and not track.last.unit)
        if now_s - track.last.start_s < _WORTH_A_LINE_S and not has_to_say:
            return
        if track.last.phase == SPAWN and now_s - track.last.start_s < _REPEAT_S:
            return
        if track.last is not self._mentioned.get(name):
            self.say(self._describe(track, now_s))

    def _last_said_s(self, line: ProgressLine) -> float:
        said = self._mentioned.get(line.name)
        return said.time_s if said is not None else line.start_s

    def _describe(self, track: PhaseTrack, now_s: float) -> str:
        last = track.last
        parts = [f"{now_s - self._start_s:6.1f} s"]
        if self._num_ranks > 1:
            parts.append(f"rank {last.rank}")
        parts.append(f"{last.phase:<10}")
        if last.total:
            parts.append(f"{amount(last.done, last.unit, short=True)} of {amount(last.total, last.unit)}")
        pace = track.pace
        if pace.per_s is not None and now_s - last.start_s >= _WORTH_A_LINE_S:
            parts.append(f"{amount(pace.per_s, last.unit)}/s")
        if pace.remaining_s is not None and last.done < last.total:
            parts.append(f"{pace.remaining_s:.0f} s left")
        if last.detail:
            parts.append(last.detail)
        return "  ".join(parts).rstrip()

    def _show_live(self) -> None:
        if all(track.last.phase == READY for track in self._tracks.values()):
            self._finish_live()
            return
        try:
            if self._view is None:
                self._view = _open_view(self._stream)
            self._view.show(self._tracks)
        except OSError as error:
            self._lose(error)

    def _finish_live(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            try:
                view.close()
            except OSError as error:
                self._lose(error)


def _open_view(stream: TextIO) -> LiveView:
    from firstlight.launch.terminal.live_view import LiveView  # rich is needed on a terminal only

    return LiveView(stream)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _explained(report: Path) -> list[str]:
    """The start-up report: what runs the model, in which layouts, and where the memory goes."""
    try:
        values: dict[str, Any] = msgspec.json.decode(report.read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    rows = [("files", values["checkpoint_notes"]), ("backend", [values["backend"]])]
    if "collectives" in values:
        rows.append(("ranks", [values["collectives"]]))
    rows += [("layout", values["layouts"]), ("memory", values["memory"])]
    if values.get("drafter_notes"):
        rows.append(("drafter", [values["drafter"], *values["drafter_notes"]]))
    return [f"  {name:<9} {note}" for name, notes in rows for note in notes]
