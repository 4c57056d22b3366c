"""Asking our own public port whether the server is healthy, as any client would.

Called by the supervisor once the engine says it is ready: *ready* is what a client sees, nothing less.
Invariant: it gives up after a fraction of a second, so that the supervisor stays awake.
"""

from __future__ import annotations

import socket

from firstlight.base.config import ServerSection

_TIMEOUT_S = 0.5
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def is_healthy(server: ServerSection) -> bool:
    """Whether `GET /health` on the public socket answers 200 now."""
    try:
        with _connect(server) as connection:
            connection.sendall(_REQUEST)
            return connection.recv(64).split(b" ", 2)[1:2] == [b"200"]
    except OSError:  # refused, reset or too slow: not healthy yet
        return False


def reachable_host(host: str) -> str:
    """The address by which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _connect(server: ServerSection) -> socket.socket:
    if server.uds is not None:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.settimeout(_TIMEOUT_S)
        plain.connect(server.uds)
    else:
        plain = socket.create_connection((reachable_host(server.host), server.port), timeout=_TIMEOUT_S)
    if server.tls_cert is None:
        return plain
    import ssl  # not needed by most servers

    context = ssl.create_default_context()
    context.check_hostname = False  # we know whom we asked: the port is ours
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)
