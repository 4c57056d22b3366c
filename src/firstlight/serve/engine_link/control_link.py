"""The api process obeys its supervisor: when to accept clients, when to refuse them and why.

Invariant: nothing is accepted on the public socket before the order to do so has come, and when the
supervisor is gone the process stops.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

from firstlight.engine.messages import Failed
from firstlight.serve.engine_link.orders import LOST, Accept, Order, Refuse, Resume, decode_order
from firstlight.serve.http.http_server import HttpServer


class Refusing(Protocol):
    """Who takes requests, or not."""

    def refuse(self, failure: Failed) -> None: ...

    def resume(self) -> None: ...


class ControlLink:
    """Reads orders from `control`, which it owns; hands `listener` to `http` when it is told to.

    `startup`: what /startup shows, filled in with the order to accept; while requests are refused, why.
    """

    def __init__(
        self,
        control: socket.socket,
        listener: socket.socket,
        http: HttpServer,
        client: Refusing,
        startup: dict[str, Any],
    ) -> None:
        self._control = control
        self._listener = listener
        self._http = http
        self._client = client
        self._startup = startup
        self._rest = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen to orders from now on."""
        self._control.setblocking(False)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)

    def close(self) -> None:
        """Listen no more."""
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._listener.close()

    def _read(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._http.ask_to_stop()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._obey(decode_order(line))

    def _obey(self, order: Order) -> None:
        match order:
            case Accept(startup=startup):
                self._startup.update(startup)
                task = asyncio.get_running_loop().create_task(self._http.accept(self._listener.dup()))
                self._tasks.add(task)
            case Refuse(message=message, hint=hint, for_good=for_good):
                self._startup["status"] = LOST if for_good else "stalled"
                self._startup["verdict"] = {"message": message, "what_to_do": hint}
                self._client.refuse(Failed(message, hint, 6))
            case Resume():
                self._startup.pop("verdict", None)
                self._startup["status"] = "ready"
                self._client.resume()
