"""The supervisor's end of its link to the api process: orders, and the request that proves it is ready.

Invariant: nothing here waits for the api process; a stuck one is noticed elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.base.config import API_SOCKET, RunConfig
from firstlight.serve.engine_link.orders import Order, encode_order

_PROBE_DEADLINE_S = 60.0


class ApiLink:
    """Made before the api process, which inherits `child`."""

    def __init__(self) -> None:
        self._ours, self.child = socket.socketpair()
        self._ours.setblocking(False)

    def send(self, order: Order) -> None:
        """Give an order. To a process that is dead or does not read, it is lost."""
        with contextlib.suppress(OSError):
            self._ours.sendall(encode_order(order))

    def close(self) -> None:
        """The api process stops when it sees this."""
        self._ours.close()
        self.child.close()


def ask_for_a_token(config: RunConfig, tell: Callable[[bool], None]) -> None:
    """Ask for one token through the api process, as a client would; a thread tells whether it came."""
    threading.Thread(target=lambda: tell(_generates(config)), name="probe", daemon=True).start()


def _generates(config: RunConfig) -> bool:
    body = msgspec.json.encode(
        {"model": config.model.served_names[0], "prompt": [0, 1], "max_tokens": 1, "temperature": 0}
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PROBE_DEADLINE_S)
            connection.connect(str(Path(config.run_dir) / API_SOCKET))
            connection.sendall(head.encode() + body)
            return connection.recv(64).split(b" ", 2)[1:2] == [b"200"]
    except OSError:  # it is not there yet, or did not answer
        return False
