"""A client for asking HTTP servers: this machine's own directly, others through the environment's proxies.

A shape test keeps other clients out. Invariant: what is asked of this machine never leaves it, whatever
http_proxy or ALL_PROXY say.
"""

from __future__ import annotations

from typing import Any

import httpx

from firstlight.base.loopback import is_here, reachable
from firstlight.base.urls import proxy_error, proxy_of, server_address


def open_client(url: str, **settings: Any) -> httpx.Client:
    """A client of the server at `url`, which the caller closes. `settings` are httpx's.

    Raises `UsageError` for what is no address, and for a proxy that cannot be used.
    """
    parts = server_address(url)
    base = parts.geturl().rstrip("/").removesuffix("/v1")
    is_near = is_here(reachable(parts.hostname or ""))
    if parts.scheme == "https":
        settings = {"verify": httpx.create_ssl_context(), **settings}  # SSL_CERT_FILE counts all the same
    try:
        # httpx would build every proxy of the environment, and fail for one that this address never uses.
        proxy = None if is_near else proxy_of(parts)
        return httpx.Client(base_url=base, proxy=proxy, trust_env=False, **settings)
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # a SOCKS proxy without its library
        raise proxy_error(base, error) from error
