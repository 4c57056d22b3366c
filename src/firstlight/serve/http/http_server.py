"""uvicorn, opened and stopped in our order: ask the supervisor before the first client, drain before the end.

Invariants: the public socket is accepted on only while the supervisor says so; on a stop new requests are
told so at once, open ones run on within `drain_s`, and then the socket is closed for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any, Protocol

import uvicorn

from firstlight.base.accepting import Door
from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.base.phases import DRAIN, SERVING, PhaseReporter
from firstlight.serve.http.connections import Guard

CLOSE_MARGIN_S = 2.0  # after the engine's deadline, for the last bytes to clients
DRAIN_LOOK_S = 0.02


class OpenWork(Protocol):
    """The engine as far as the HTTP side must know it: what is open there, and its beginning and end."""

    @property
    def num_open(self) -> int: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def drain(self, deadline_s: float) -> None: ...


class HttpServer(uvicorn.Server):
    """The api process's HTTP side. `serving_unit`: what the odometer counts while it serves."""

    serving_unit = "ticks"

    def __init__(
        self,
        config: uvicorn.Config,
        client: OpenWork,
        drain_s: float,
        guard: Guard,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(config)
        self._guard = guard
        self._client = client
        self._drain_s = drain_s
        self._recorder = recorder or NoBox()
        self._report = PhaseReporter(self._recorder).report
        self._first: socket.socket | None = None  # accepted on from the start
        self._public: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM asks for a stop; unlike uvicorn's own handler, it is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask_to_stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: the event loop turns."""
        self._recorder.set(Counter.STEP, counter)
        self._recorder.set(Counter.RUNNING, self._client.num_open)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it was asked to stop; it accepts until the last open request has ended.

        Whoever comes meanwhile is told so by the gate, at once: the supervisor holds the socket too, so that
        connections nobody accepts would wait in the kernel.
        """
        self._report(DRAIN, self._client.num_open, unit="requests")
        drained_s = monotonic() + self._drain_s + CLOSE_MARGIN_S / 2
        self._client.drain(self._drain_s)
        while self._client.num_open and monotonic() < drained_s:
            await asyncio.sleep(DRAIN_LOOK_S)
        left_s = drained_s + CLOSE_MARGIN_S / 2 - monotonic()
        self.config.timeout_graceful_shutdown = max(1, round(left_s))
        for server in self.servers:
            server.close()
        if self._public is not None:
            _stop_listening(self._public)
        await super().shutdown(sockets)

    def ask_to_stop(self) -> None:
        """Begins a graceful stop; may be called from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn."""
        await super().startup(sockets)
        if self._first is not None:
            await self.accept(self._first)

    async def run_on(self, listener: socket.socket) -> None:
        """Serves on `listener`, which it closes, until asked to stop."""
        self._first = listener
        await self._run([])

    async def run_private(self, path: str) -> None:
        """Serves on a Unix socket at `path`, without TLS, until asked to stop; see `accept`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as private:
            private.bind(path)
            private.listen()
            await self._run([private])

    async def accept(self, listener: socket.socket) -> None:
        """Accept on the public socket, from now on; closes it at the end."""
        protocol_class: Any = self.config.http_protocol_class
        protocol = functools.partial(
            protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            peers=self._guard,
        )
        self._public = listener.dup()  # the door closes the one it is given
        door: Any = Door(listener, protocol, self._guard.seats, self._tls, self._guard.header_timeout_s)
        self.servers.append(door)
        self._report(SERVING, unit=self.serving_unit)

    async def _run(self, sockets: list[socket.socket]) -> None:
        self.config.load()
        self._tls, self.config.ssl = self.config.ssl, None  # uvicorn opens the private socket with it
        self._client.start()
        try:
            await self.serve(sockets=sockets)
        finally:
            await self._client.close()


def _stop_listening(listener: socket.socket) -> None:
    """Ends the socket itself, not only our hold on it: from now on clients are refused, not left waiting."""
    with listener, contextlib.suppress(OSError):  # not every system can; there, the supervisor's end does it
        listener.shutdown(socket.SHUT_RDWR)
