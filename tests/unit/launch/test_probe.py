"""The question to our own port."""

from __future__ import annotations

import socket
import threading

import pytest

from firstlight.base.config import ServerSection
from firstlight.launch.listen import bound_port, listen
from firstlight.launch.probe import is_healthy


def answer_once(listener: socket.socket, reply: bytes) -> None:
    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1000)
            client.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()


@pytest.mark.parametrize(
    ("reply", "healthy"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Busy\r\n\r\n", False),
        (b"", False),
        (b"hello", False),
    ],
)
def test_only_a_200_is_healthy(reply: bytes, healthy: bool) -> None:
    with listen(ServerSection(port=0)) as listener:
        answer_once(listener, reply)
        assert is_healthy(ServerSection(port=bound_port(listener))) is healthy


def test_a_port_that_nobody_serves_is_not_healthy() -> None:
    with listen(ServerSection(port=0)) as listener:
        port = bound_port(listener)
    assert not is_healthy(ServerSection(port=port))
