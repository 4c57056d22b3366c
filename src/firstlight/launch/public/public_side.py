"""What the world sees of a run: the answers on the port, the person's terminal, and who gives them when.

Invariant: of front and api process exactly one accepts on the public socket, except for the moment of the
hand-over, in which nobody does.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from firstlight.base.config import RunConfig
from firstlight.base.errors import EngineError
from firstlight.base.phases import PLACES
from firstlight.launch.control import OnStall
from firstlight.launch.processes.commands import API, title
from firstlight.launch.processes.output import OutputLine
from firstlight.launch.public.api_link import ApiLink
from firstlight.launch.public.startup_responder import Front, Picture
from firstlight.launch.public.startup_status import Situation, picture
from firstlight.launch.public.systemd import Notifier
from firstlight.launch.runs.logs import keep_verdict, withdraw_verdict
from firstlight.launch.terminal.console import Console
from firstlight.launch.timeline.progress import PhaseTrack, ProgressLine
from firstlight.launch.verdict import Verdict
from firstlight.serve.engine_link.orders import Accept, Refuse, Resume

_MAX_HELD_LINES = 1000


class PublicSide:
    """One run as it is seen from outside."""

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        front: Front,
        listener: socket.socket,
        notifier: Notifier,
    ) -> None:
        self.link = ApiLink()
        self._config = config
        self._console = console
        self._front = front
        self._listener = listener
        self._notifier = notifier
        self._places = _places_of(config.launch.backend)
        self.status = "starting"  # as in `Picture`
        self.verdict: Verdict | None = None  # why it does not go on
        self._tracks: dict[str, PhaseTrack] = {}
        self._pids: dict[str, int] = {}
        self._lock = threading.Lock()  # lines come from the threads that drain the output
        # What the api process printed during the start: until it is ready the supervisor speaks for the run,
        # so that the reason why a start fails is said once.
        self._held: deque[str] = deque(maxlen=_MAX_HELD_LINES)
        self._is_handed_over = False

    def started(self, name: str, pid: int) -> None:
        """A child has its process."""
        self._pids[name] = pid

    def beat(self) -> None:
        """The supervisor's loop has turned."""
        self._notifier.beat()

    def progress(self, lines: Sequence[ProgressLine]) -> None:
        """The processes have moved."""
        for line in lines:
            before = self._tracks.get(line.name)
            goes_on = before is not None and before.goes_on(line)
            self._tracks[line.name] = before.followed_by(line) if before and goes_on else PhaseTrack(line)
            self._console.progress(line)
        if lines and not self._is_handed_over:
            self._publish()

    def output(self, name: str, line: OutputLine) -> None:
        """A child has printed a line: shown if it is the api's log, or with --debug. From any thread."""
        with self._lock:
            if name == API and not (self._is_handed_over or self._config.debug):
                self._held.append(line.text)
            elif name == API:
                self._console.pass_on(line.text)
            elif self._config.debug:
                self._console.say(f"{title(name)}: {line.text}")

    def hand_over(self, now_s: float) -> None:
        """Ready: from now on the api process accepts."""
        self.status = "ready"
        self._publish()
        self._front.pause()
        self.link.send(Accept(self._front.startup()))
        with self._lock:
            self._console.ready(self._config, now_s)
            self._is_handed_over = True
            for text in self._held:
                self._console.pass_on(text)
            self._held.clear()

    def take_back(self, end: Verdict) -> None:
        """The api process is ended: the front says why to whoever asks."""
        if self.status not in ("lost", "failed"):
            comes_again = self._config.launch.on_stall == OnStall.RESTART.value
            self.status = "lost" if self._is_handed_over or comes_again else "failed"
        self._tell(end)
        self._is_handed_over = False
        self._publish()
        self._front.open(self._listener)

    def refuse(self, end: Verdict, *, for_good: bool) -> None:
        """The engine is lost (`for_good`) or stands still; the api process says so."""
        if for_good:
            self.status = "lost"
        self._tell(end)
        if end.failure is not None:
            self.link.send(Refuse(end.failure.message, end.failure.hint, for_good))
        self._publish()

    def resume(self) -> None:
        """It moves again."""
        self.verdict = None
        withdraw_verdict(Path(self._config.run_dir))
        self.link.send(Resume())
        self._publish()
        self._console.say("it moves again: requests are taken.")

    def stopping(self, names: Sequence[str]) -> None:
        """Children are told to end."""
        if API in names and self.verdict is None:
            if self._is_handed_over and self.status != "stopping":
                drain_s = self._config.server.drain_s
                self._console.say(
                    f"stopping: running requests have {drain_s:g} s to end; asked again, they end now."
                )
            self.status = "stopping"
            self._publish()
            self._notifier.stopping()

    def close(self) -> None:
        """The run is over."""
        self.link.close()

    def _tell(self, end: Verdict) -> None:
        failure = end.failure
        self.verdict = end if failure is not None else None
        keep_verdict(Path(self._config.run_dir), end)
        if failure is not None and self._is_handed_over:
            self._console.failed(EngineError(failure.message, failure.hint).explain())

    def _publish(self) -> None:
        shown = self._picture()
        self._front.publish(shown)
        self._notifier.show(shown)

    def _picture(self) -> Picture:
        situation = Situation(
            status=self.status,
            model=self._config.model.served_names[0],
            tracks=self._tracks,
            pids=self._pids,
            verdict=self.verdict.failure if self.verdict else None,
            places=self._places,
        )
        return picture(situation)


def _places_of(backend: str) -> Mapping[str, int]:
    if backend == "native":
        return PLACES
    from firstlight.doctor.logs.grammar import places_of  # reads YAML, which our own engine never needs

    return places_of(backend)
