"""Ports of this machine that nobody listens on.

Used by tests that start servers of other makers, which take no port 0. Invariant: none: somebody may take it
before the caller does, as everywhere.
"""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
