"""The address of a server as a person gives it. Used by `chat` and by the benchmarks.

Invariant: what comes back has a scheme that we speak and a host.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from firstlight.base.errors import UsageError


def server_address(url: str) -> SplitResult:
    """The parts of `url`; a `UsageError` if it is not the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        reason = "" if parts.port is None or parts.port > 0 else "its port is 0"
    except ValueError as error:
        reason = str(error)
    else:
        if parts.scheme not in ("http", "https"):
            reason = "it does not begin with http:// or https://"
        elif not parts.hostname:
            reason = "it names no host"
    if reason:
        raise UsageError(
            f"--url {url} is not the address of a server: {reason}.",
            "Give one such as http://127.0.0.1:8000, as `firstlight serve` prints it.",
        )
    return parts
