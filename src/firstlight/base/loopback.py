"""Whether an address is this machine's own: of a server, of a client, of the other end of a connection.

Invariant: another machine is never taken for this one. No name is looked up, so each but `localhost` is
another machine's.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_here(host: str) -> bool:
    """Whether `host` is a loopback address, as such or in an IPv6 one, or `localhost`; a port may follow."""
    name = _without_port(host)
    if name.lower() == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def reachable(host: str) -> str:
    """The address by which this machine reaches a server that listens on `host`."""
    return _EVERY.get(host, host)


def _without_port(host: str) -> str:
    """Of "[::1]:80" and "127.0.0.1:80"; several colons without brackets are an address as a whole."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host
