"""The real world of the supervisor: child processes, their output, their progress, and our signals.

Made by `launch.serve`, driven by `supervisor.supervise`. Invariant: leaving the `with` block ends every
child that is left and gives back every descriptor and signal handler.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from firstlight.base import environment
from firstlight.base.clock import Clock
from firstlight.base.config import RunConfig
from firstlight.base.failure import read_failure
from firstlight.base.phases import READY
from firstlight.base.process import Child, start_child
from firstlight.launch.child_output import ChildOutput
from firstlight.launch.commands import API, ChildSpec
from firstlight.launch.console import Console
from firstlight.launch.control import Death, EngineReady, Event, StopAsked
from firstlight.launch.probe import is_healthy
from firstlight.launch.progress import ProgressTail
from firstlight.launch.verdict import title

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_HELD_LINES = 1000
_BUSY_WAIT_S = 0.05
_SERVING_WAIT_S = 0.5


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
        console: Console,
        clock: Clock,
        start: Callable[[ChildSpec], Child] = start_from_spec,
    ) -> None:
        self._config = config
        self._specs = specs
        self._console = console
        self._clock = clock
        self._start = start
        self._running: dict[str, tuple[Child, ChildOutput]] = {}
        self._num_stops = 0
        self._is_ready = False
        # What the api process printed during the start: until it is ready the launcher speaks for the run, so
        # that the reason why a start fails is said once.
        self._held: deque[str] = deque(maxlen=_MAX_HELD_LINES)

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._tail = ProgressTail(Path(self._config.run_dir))
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._previous_fd = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in _STOP_SIGNALS
            # `nohup firstlight serve &` ignores the hang-up of its terminal, and it shall stay so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            for spec in self._specs:
                child = self._start(spec)
                self._running[spec.name] = child, ChildOutput(child.output_fd)
                self._selector.register(child.output_fd, selectors.EVENT_READ, spec.name)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def wait(self, *, is_serving: bool) -> Sequence[Event]:
        """What happened, at the latest after half a second."""
        for key, _ in self._selector.select(_SERVING_WAIT_S if is_serving else _BUSY_WAIT_S):
            if key.data is None:
                self._empty_wake_up()
            else:
                self._pass_on(key.data)
        stops, self._num_stops = self._num_stops, 0
        return [*self._progress(), *(StopAsked() for _ in range(stops)), *self._deaths()]

    def terminate(self, names: Sequence[str]) -> None:
        """Ask these children to end."""
        self._send(names, signal.SIGTERM)

    def kill(self, names: Sequence[str]) -> None:
        """End these children."""
        self._send(names, signal.SIGKILL)

    def probe(self) -> bool:
        """Ask the public port."""
        return is_healthy(self._config.server)

    def announce(self) -> None:
        """Tell the person."""
        self._console.ready(self._config, self._clock.now_s())
        self._is_ready = True
        self._say_all(self._held)
        self._held.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_stops += 1

    def _empty_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(64):
                pass

    def _pass_on(self, name: str) -> None:
        """Show what a person should see of a child's output: the api's log, or everything with --debug."""
        output = self._running[name][1]
        lines = output.read_lines()
        if output.has_ended:
            self._selector.unregister(output.fd)
        if name == API:
            if self._is_ready or self._config.debug:
                self._say_all(lines)
            else:
                self._held.extend(lines)
        elif self._config.debug:
            self._say_all([f"{title(name)}: {line}" for line in lines])

    def _say_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.say(line)

    def _progress(self) -> list[Event]:
        events: list[Event] = []
        for line in self._tail.read():
            self._console.progress(line)
            if line.phase == READY and line.rank == 0:
                events.append(EngineReady())
        return events

    def _deaths(self) -> list[Event]:
        events: list[Event] = []
        for name, (child, output) in list(self._running.items()):
            cause = child.poll()
            if cause is None:
                continue
            if not output.has_ended:
                self._pass_on(name)
            self._forget(name)
            failure = read_failure(self._config.run_dir, name)
            events.append(Death(name, self._clock.now_s(), cause, failure, tuple(output.kept)))
        return events

    def _forget(self, name: str) -> None:
        child, output = self._running.pop(name)
        if output.fd in self._selector.get_map():
            self._selector.unregister(output.fd)
        child.close()

    def _send(self, names: Sequence[str], number: int) -> None:
        for name in names:
            if name in self._running:
                self._running[name][0].send(number)

    def _leave(self) -> None:
        for name, (child, _) in list(self._running.items()):  # only after an error of our own
            child.send(signal.SIGKILL)
            child.wait()
            self._forget(name)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._selector.close()
        self._tail.close()
        self._wake_read.close()
        self._wake_write.close()
