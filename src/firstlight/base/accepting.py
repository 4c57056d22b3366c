"""Accepting connections of strangers: within the seats there are, and with a deadline for TLS handshakes.

asyncio's own server counts a connection only after its handshake, and has no say in how many there are.
Invariant: a socket that is accepted is handed to a protocol, or closed within the handshake's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable

from firstlight.base.client_limits import Seats

_AT_ONCE = 64  # connections accepted before others have their turn
_PAUSE_S = 0.5  # after the system had no descriptor for another connection
_OTHER_FILES = 128  # descriptors that are not of connections


class Door:
    """Accepts on `listener`, which it closes, from its making until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        inside: Callable[[], asyncio.Protocol],
        seats: Seats,
        tls: ssl.SSLContext | None = None,
        handshake_s: float = 20.0,
    ) -> None:
        self._listener = listener
        self._inside = inside
        self._seats = seats
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accepts nothing more. What was accepted goes on."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        if self._again is not None:
            self._again.cancel()

    async def wait_closed(self) -> None:
        """As asyncio's servers have it: it is closed at once."""

    def _open(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left
                self._loop.remove_reader(self._listener.fileno())
                self._again = self._loop.call_later(_PAUSE_S, self._open)
                self._seats.give_one_up()
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Arrival(self, connection)

    def admit(self, guest: _Arrival) -> bool:
        """Whether there is a seat for a handshake; one without TLS needs none before its protocol has one."""
        return self._tls is None or self._seats.take(guest)

    async def lead_in(self, guest: _Arrival, connection: socket.socket) -> None:
        """From the socket to its protocol."""
        try:
            await self._loop.connect_accepted_socket(
                self._inside,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s if self._tls is not None else None,
            )
        except (OSError, asyncio.CancelledError):  # no handshake in time, or a wrong one, or none wanted
            connection.close()
        finally:
            self._seats.leave(guest)


class _Arrival:
    """A connection on its way in."""

    num_held_bytes = 0

    def __init__(self, door: Door, connection: socket.socket) -> None:
        self._connection = connection
        if door.admit(self):
            self._task = asyncio.get_running_loop().create_task(door.lead_in(self, connection))
            self._task.add_done_callback(self._end)
        else:
            connection.close()

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before it began
            self._connection.close()

    def give_way(self) -> None:
        """Called by the seats."""
        self._task.cancel()


class TaskGuest:
    """The seat of a connection that the current task serves."""

    num_held_bytes = 0

    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def give_way(self) -> None:
        """Called by the seats."""
        if self._task is not None:
            self._task.cancel()


def most_connections(wanted: int, *, may_raise: bool = False) -> int:
    """How many of `wanted` connections this process has descriptors for.

    `may_raise`: it may raise its own limit as far as the system lets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if may_raise and soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - min(_OTHER_FILES, soft // 2)))
