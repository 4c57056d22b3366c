"""The public socket and what answers on it, opened before anything else is imported.

Standard library only, and only such modules of ours. Invariant: a Unix socket is removed when its `Early` is
closed, and never a second time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from firstlight.launch.public.listen import Where, listen
from firstlight.launch.public.startup_responder import Front


class PublicAddress(Where, Protocol):
    """Where the public socket is, and how it speaks; `base.config.ServerSection` is one."""

    @property
    def tls_cert(self) -> str | None: ...

    @property
    def tls_key(self) -> str | None: ...


class Address(NamedTuple):
    """A `PublicAddress` from before there are config sections."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


class Early:
    """A public socket that is answered on already. It belongs to whoever holds this."""

    def __init__(self, listener: socket.socket, front: Front, address: Address, keys: Sequence[str]) -> None:
        self.listener = listener
        self.front = front
        self._address = address
        self._keys = tuple(keys)

    def suits(self, address: PublicAddress, keys: Sequence[str]) -> bool:
        """Whether this is what one would open for `address` and `keys`."""
        return self._address == _copied(address) and self._keys == tuple(keys)

    def close(self) -> None:
        """Stop answering and give the address back. Once is enough."""
        if self.listener.fileno() < 0:
            return
        self.front.close()
        self.listener.close()
        if self._address.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._address.uds)


def open_early(address: PublicAddress, keys: Sequence[str]) -> Early:
    """Bind and answer. The keys and files of TLS are those of the api process."""
    listener = listen(address)
    try:
        front = Front()
        front.protect(keys, address.tls_cert, address.tls_key)
        front.open(listener)
    except BaseException:
        listener.close()
        raise
    return Early(listener, front, _copied(address), keys)


def _copied(address: PublicAddress) -> Address:
    return Address(address.host, address.port, address.uds, address.tls_cert, address.tls_key)
