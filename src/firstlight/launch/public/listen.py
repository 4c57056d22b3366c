"""The public socket: bound and listening before anything else happens.

Standard library only, as it comes before any other import. Invariant: from the moment `listen` returns, a
client's connection is held by the kernel and not refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import Protocol

from firstlight.base.errors import FirstlightError, ResourceError, UsageError

_BACKLOG = 2048


class Where(Protocol):
    """An address to listen on. `uds` wins."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def uds(self) -> str | None: ...


def listen(server: Where) -> socket.socket:
    """The listening socket of `server`; the caller owns it. Raises `ResourceError` or `UsageError`."""
    if server.uds is not None:
        return _listen_unix(server.uds)
    return _listen_tcp(server.host, server.port)


def bound_port(listener: socket.socket) -> int:
    """The port of a TCP listener (also where port 0 was asked for); 0 for a Unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(
            f"--host {host} is no address of this machine: {error.strerror}.",
            "Use 127.0.0.1 for this machine only, or 0.0.0.0 for every address it has.",
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _explained(host, port, error) from error
    return listener


def _explained(host: str, port: int, error: OSError) -> FirstlightError:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ResourceError(
            f"cannot listen on {where}: the port is taken by another program.",
            "Choose another with --port, or --port 0 for a free one; `ss -ltnp` shows who has it.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(
            f"cannot listen on {where}: this port is for privileged users only.",
            "Choose a port of 1024 or above with --port.",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(
            f"cannot listen on {where}: this machine does not have that address.",
            "Use 127.0.0.1 for this machine only, or 0.0.0.0 for every address it has.",
        )
    return ResourceError(f"cannot listen on {where}: {error.strerror}.", "Choose another --host or --port.")


def _listen_unix(path: str) -> socket.socket:
    """A Unix socket for us and our group. A stale one is replaced, a live one or another file is not."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o117)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)  # "AF_UNIX path too long" has no strerror
        raise ResourceError(
            f"cannot listen on the Unix socket {path}: {reason}.",
            "Choose a path of at most 107 bytes in a folder that you may write to.",
        ) from error
    finally:
        os.umask(previous)
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ResourceError(f"--uds {path} exists and is not a socket.", "Choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass  # it is there and busy
    raise ResourceError(
        f"another server listens on the Unix socket {path}.", "Stop it or choose another path."
    )
