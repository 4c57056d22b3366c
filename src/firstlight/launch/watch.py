"""Watches a run from outside: notices that nothing moves, sends for the doctor, tells the supervisor.

A thread of the supervisor, started by `children`. Invariants: an idle server is healthy; nothing is said
before two looks agree, unless a process is dead or stopped; and what moves again is no longer stuck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from firstlight.base.blackbox.reader import Box, NotABox, read_box
from firstlight.base.blackbox.store import boxes_of
from firstlight.base.clock import Clock
from firstlight.base.config import RunConfig
from firstlight.launch.backends.protocol import Follower
from firstlight.launch.control import OnStall
from firstlight.launch.events import Event, Recovered, Stalled
from firstlight.launch.processes.commands import API
from firstlight.launch.timeline.progress_watch import Pulses, has_work, is_serving, read_mark

_LOOK_S = 0.5


class Watch:
    """Watches the processes `pids` of a run."""

    def __init__(
        self,
        config: RunConfig,
        pids: Mapping[str, int],
        tell: Callable[[Event], None],
        clock: Clock,
        follower: Follower,
    ) -> None:
        self._config = config
        self._pids = pids
        self._tell = tell
        self._clock = clock
        self._follower = follower
        self._pulses = Pulses()
        self._verdict: Stalled | None = None
        self._next_look_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """The run is told to end: who stands still then is somebody else's business."""
        self._end.set()

    def join(self) -> None:
        """Wait for the thread's end; an examination has its deadlines."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        now_s, boxes = self._take_pulses()
        ranks = [name for name in boxes if name != API]
        # With the verdict all requests were ended: that nothing is open then is no recovery.
        if not ranks or (self._verdict is None and self._is_at_rest(boxes, ranks)):
            self._pulses.rest(ranks, now_s)
        quiet_s = self._pulses.quiet_s(now_s)
        stopped = self._pulses.stopped()
        ranks_s = min((quiet_s[name] for name in ranks), default=0.0)
        quietest_s = max(ranks_s, quiet_s.get(API, 0.0) if self._api_should_move(boxes, ranks) else 0.0)
        if self._verdict is not None:
            if not stopped and quietest_s < _LOOK_S:
                self._verdict = None
                self._tell(Recovered())
        elif stopped or (quietest_s >= self._config.launch.stall_look_s and now_s >= self._next_look_s):
            self._examine(boxes, quiet_s)
            # What is busy without a sign of progress may be so for long: it is not looked at all the time.
            self._next_look_s = self._clock.now_s() + quietest_s / 2

    def _take_pulses(self) -> tuple[float, dict[str, Box]]:
        now_s, boxes = self._clock.now_s(), self._boxes()
        marks = {name: read_mark(box, self._pids.get(name, box.pid)) for name, box in boxes.items()}
        self._pulses.look(marks, now_s)
        return now_s, boxes

    def _is_at_rest(self, boxes: Mapping[str, Box], ranks: list[str]) -> bool:
        """All ranks serve, and neither the leading one nor the api process has anything open.

        The api process counts too: a rank that hangs between two requests has not taken the next one.
        """
        asked = [boxes[name] for name in (ranks[0], API) if name in boxes]
        return all(is_serving(boxes[name]) for name in ranks) and not any(map(has_work, asked))

    def _api_should_move(self, boxes: Mapping[str, Box], ranks: list[str]) -> bool:
        """Its event loop turns as soon as its imports are done; and ranks that are ready wait for these."""
        api = boxes.get(API)
        if api is None:
            return False
        return (is_serving(api) and api.step > 0) or all(is_serving(boxes[name]) for name in ranks)

    def _boxes(self) -> dict[str, Box]:
        found = {}
        for name, path in boxes_of(Path(self._config.run_dir)).items():
            try:
                found[name] = read_box(path, with_events=False)
            except NotABox:
                continue
        return found

    def _examine(self, boxes: Mapping[str, Box], quiet_s: Mapping[str, float]) -> None:
        """Two looks of the doctor; then, unless it is proven, wait until the verdict is due."""
        from firstlight.launch.examination import examine_run  # see there

        is_final = self._config.launch.on_stall != OnStall.REPORT.value
        target, thresholds = self._follower.target(), self._follower.thresholds(boxes)
        found = examine_run(target, thresholds, quiet_s, is_final=is_final)
        verdict = found.verdict
        if verdict is None or self._end.is_set():
            # Only what really moved starts the time anew: who is merely busy has to show something some day.
            if found.has_moved:
                self._pulses.rest(list(boxes), self._clock.now_s())
            return
        if not found.is_proven and not self._stays_quiet(verdict.name):
            return
        self._verdict = verdict
        self._tell(verdict)

    def _stays_quiet(self, name: str) -> bool:
        """Wait until the verdict on a process is due; False when it moves, or the run is told to end."""
        while True:
            now_s, _ = self._take_pulses()
            quiet_s = self._pulses.quiet_s(now_s).get(name, 0.0)
            if quiet_s < self._config.launch.stall_look_s:
                return False
            if quiet_s >= self._config.launch.stall_verdict_s:
                return True
            if self._end.wait(_LOOK_S):
                return False
