"""What systemd is told of a service of type `notify`: ready, where it is, stopping, and that it works.

Invariants: nobody listening costs nothing, and nobody reading a second at most, twice in a life; the watchdog
hears from us only while a start goes on, somebody could be served, or an end is under way.
"""

from __future__ import annotations

import contextlib
import socket

from firstlight.base.clock import Clock
from firstlight.base.environment import ServiceManager
from firstlight.launch.public.startup_responder import Picture

_GOING_ON = ("starting", "stopping")
_READY = "The model is ready."
_INTERVAL_S = 1.0  # between two rows of progress
# A start that advances may take longer than systemd would wait: with each row it gets this much more.
_EXTENSION_S = 60
_PATIENCE_S = 1.0  # for what is said only once, with a manager that is slow to read


class Notifier:
    """Speaks to the service manager, if there is one. Of the supervisor's thread."""

    def __init__(self, manager: ServiceManager | None, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock
        self._socket: socket.socket | None = None
        self._is_ready = self._is_stopping = False
        self._is_well = True
        self._message = ""
        self._beat_at_s = self._message_at_s = 0.0
        if manager is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def show(self, picture: Picture) -> None:
        """What the public port says from now on, or would say if it had to."""
        is_ready = picture.status == "ready"
        if is_ready and not self._is_ready:
            self._is_ready = True
            self._send("READY=1", patience_s=_PATIENCE_S)
        healthy = is_ready and "verdict" not in picture.startup
        self._is_well = healthy or picture.status in _GOING_ON
        message = _READY if healthy else " ".join(picture.message.split())
        now_s = self._clock.now_s()
        is_too_soon = picture.status == "starting" and now_s < self._message_at_s + _INTERVAL_S
        if message == self._message or is_too_soon:
            return
        self._message, self._message_at_s = message, now_s
        extension = [] if self._is_ready else [f"EXTEND_TIMEOUT_USEC={_EXTENSION_S * 1_000_000}"]
        self._send(f"STATUS={message}", *extension)

    def stopping(self) -> None:
        """The service ends, whoever asked for it."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1", patience_s=_PATIENCE_S)

    def beat(self) -> None:
        """The loop has turned; said at half of the time after which systemd would end us.

        Not said of an engine that stands still or is lost: for who waits for it, we turn in vain.
        """
        watchdog_s = self._manager.watchdog_s if self._manager is not None else None
        now_s = self._clock.now_s()
        if watchdog_s is not None and self._is_well and now_s >= self._beat_at_s:
            self._beat_at_s = now_s + watchdog_s / 2
            self._send("WATCHDOG=1")

    def close(self) -> None:
        """Say that it ends, and then nothing more."""
        self.stopping()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *rows: str, patience_s: float = 0.0) -> None:
        if self._socket is None or self._manager is None:
            return
        self._socket.settimeout(patience_s)
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(rows).encode(), self._manager.address)
