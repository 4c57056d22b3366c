"""The real world of the supervisor: child processes, their output, their boxes, the port, and our signals.

Invariant: leaving the `with` block ends every child that is left and gives back every descriptor and signal
handler.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from firstlight.base import environment
from firstlight.base.clock import Clock
from firstlight.base.config import RunConfig
from firstlight.base.failure import read_failure
from firstlight.base.process import Child, start_child
from firstlight.launch.backends.native import NativeFollower
from firstlight.launch.backends.protocol import Follower
from firstlight.launch.control import Stage
from firstlight.launch.events import Death, EngineReady, Event, Probed, StopAsked
from firstlight.launch.processes.commands import API, ChildSpec
from firstlight.launch.processes.doctor_socket import DoctorSocket
from firstlight.launch.processes.exit_reasons import Obituaries
from firstlight.launch.processes.janitor_process import Janitor
from firstlight.launch.processes.orphans import Strays, adopt_orphans, reap_orphans
from firstlight.launch.processes.output import ChildOutput, OutputLine
from firstlight.launch.public.api_link import ask_for_a_token
from firstlight.launch.public.public_side import PublicSide
from firstlight.launch.runs.logs import log_path, note_orphan
from firstlight.launch.verdict import Verdict
from firstlight.launch.watch import Watch

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BUSY_WAIT_S = 0.05
_SERVING_WAIT_S = 0.25
_UNKILLABLE_S = 1.0
_LAST_OUTPUT_S = 0.5  # for what a dead child has written and nobody has read


def start_from_spec(spec: ChildSpec) -> Child:
    """Start a child as `spec` says. Main thread only."""
    variables = environment.child_environment(spec.variables)
    return start_child(spec.command, variables, pass_fds=spec.pass_fds, cores=spec.cores)


class Children:
    """Starts `specs` on entering and reports what happens to them."""

    def __init__(
        self,
        config: RunConfig,
        specs: Sequence[ChildSpec],
        public: PublicSide,
        clock: Clock,
        janitor: Janitor | None = None,
        follower: Follower | None = None,
    ) -> None:
        self._config = config
        self._specs = specs
        self._public = public
        self._clock = clock
        self._janitor = janitor
        self._follower = follower or NativeFollower(config)
        self._running: dict[str, tuple[Child, ChildOutput]] = {}
        self._pidfds: dict[str, int] = {}
        self._happened: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pids: dict[str, int] = {}
        self._strays = Strays()
        self._obituaries = Obituaries(config.run_dir)
        self._watch = Watch(config, self._pids, self._tell, clock, self._follower)

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._previous_fd = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in _STOP_SIGNALS
            # `nohup firstlight serve &` ignores the hang-up of its terminal, and it shall stay so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        adopt_orphans()
        self._doctor = DoctorSocket(
            Path(self._config.run_dir), lambda: self._public.verdict, lambda: self._public.status
        )
        try:
            for spec in self._specs:
                self._launch(spec)
            self._watch.start()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def wait(self, stage: Stage) -> Sequence[Event]:
        """What happened, at the latest after a quarter of a second."""
        is_quiet = stage in (Stage.READY, Stage.STALLED)
        self._selector.select(_SERVING_WAIT_S if is_quiet else _BUSY_WAIT_S)
        self._empty_wake_up()
        self._public.beat()
        self._bury_orphans()
        self._strays.reap(self._clock.now_s())
        events = [*self._progress(stage), *self._deaths()]
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._happened.get_nowait())
        return events

    def terminate(self, names: Sequence[str]) -> None:
        """Ask these children to end."""
        self._watch.stop()
        self._public.stopping(names)
        self._send(names, signal.SIGTERM)

    def kill(self, names: Sequence[str]) -> None:
        """End these children."""
        self._watch.stop()
        self._send(names, signal.SIGKILL)

    def probe(self) -> None:
        """Ask for a token through the api process."""
        ask_for_a_token(self._config, lambda healthy: self._tell(Probed(healthy)))

    def hand_over(self) -> None:
        """The api process takes the clients."""
        self._follower.answered()
        self._public.progress(self._follower.read(self._clock.now_s()))
        self._public.hand_over(self._clock.now_s())

    def take_back(self, end: Verdict) -> None:
        """The api process must be unable to accept before we do: also a stopped one does not survive this."""
        self._send([API], signal.SIGKILL)
        self._public.take_back(end)

    def refuse(self, end: Verdict, *, for_good: bool) -> None:
        """The api process says why."""
        self._public.refuse(end, for_good=for_good)

    def accept(self) -> None:
        """The api process takes requests again."""
        self._public.resume()

    def _launch(self, spec: ChildSpec) -> None:
        child = start_from_spec(spec)
        if self._janitor is not None:
            self._janitor.name(child.pid)
        path = log_path(Path(self._config.run_dir), spec.name)
        output = ChildOutput(child.output_fd, path, lambda line: self._on_line(spec.name, line))
        self._running[spec.name] = child, output
        self._pids[spec.name] = child.pid
        self._follower.started(spec.name, child.pid)
        self._public.started(spec.name, child.pid)
        with contextlib.suppress(OSError, AttributeError):  # not every system has them: then we look often
            fd = self._pidfds[spec.name] = os.pidfd_open(child.pid)
            self._selector.register(fd, selectors.EVENT_READ)

    def _on_line(self, name: str, line: OutputLine) -> None:
        self._follower.output(name, line)
        self._public.output(name, line)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._tell(StopAsked())

    def _tell(self, event: Event) -> None:
        """From any thread."""
        self._happened.put(event)
        with contextlib.suppress(OSError):  # it is full of wake-ups, or we have left
            self._wake_write.send(b"x")

    def _empty_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(64):
                pass

    def _progress(self, stage: Stage) -> list[Event]:
        lines = self._follower.read(self._clock.now_s())
        self._public.progress(lines)
        return [EngineReady()] if stage is Stage.STARTING and self._follower.can_answer(lines) else []

    def _deaths(self) -> list[Event]:
        events: list[Event] = []
        for name, (child, output) in list(self._running.items()):
            cause = child.poll()
            if cause is None:
                continue
            output.join(_LAST_OUTPUT_S)
            self._forget(name)
            is_oom = self._obituaries.write(name, child.pid, cause)
            self._follower.ended(name)
            failure = read_failure(self._config.run_dir, name) or self._follower.last_words(name)
            now_s = self._clock.now_s()
            events.append(Death(name, now_s, cause, failure, output.last_lines, is_oom=is_oom))
        for lost in self._follower.lost(self._clock.now_s()):
            is_oom = self._obituaries.write(lost.name, lost.pid, lost.cause)
            events.append(Death(lost.name, self._clock.now_s(), lost.cause, is_oom=is_oom))
        return events

    def _bury_orphans(self) -> None:
        leaders = {pid: name for name, pid in self._pids.items()}
        for orphan in reap_orphans(leaders.keys()):
            note_orphan(Path(self._config.run_dir), leaders[orphan.session], orphan)

    def _forget(self, name: str) -> None:
        child, _ = self._running.pop(name)
        if name in self._pidfds:
            fd = self._pidfds.pop(name)
            self._selector.unregister(fd)
            os.close(fd)
        child.close()

    def _send(self, names: Sequence[str], number: int) -> None:
        for name in names:
            if name in self._running:
                self._obituaries.told(name, number)
                self._running[name][0].send(number)

    def _leave(self) -> None:
        self._doctor.close()
        self._watch.join()
        for name, (child, _) in list(self._running.items()):  # after an error of ours, or it cannot be killed
            child.send(signal.SIGKILL)
            child.wait(_UNKILLABLE_S)
            self._forget(name)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
