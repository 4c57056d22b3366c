"""Which addresses are this machine's own, as URLs, sockets and the kernel's tables write them."""

from __future__ import annotations

import pytest

from firstlight.base.loopback import is_here, reachable

HERE = (
    *("127.0.0.1", "127.0.0.53", "127.255.255.254", "::1", "0000:0000:0000:0000:0000:0000:0000:0001"),
    *("localhost", "LOCALHOST", "::ffff:127.0.0.1", "::FFFF:127.8.9.1", "::1%lo", "[::1]"),
    *("127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:1", "localhost:80"),
)
ELSEWHERE = (
    *("", ":8000", "[", "[]:80", "10.0.0.7", "128.0.0.1", "126.255.255.255", "0.0.0.0", "::", "::2"),
    *("fe80::1", "::1234", "::ffff:10.0.0.7", "2001:db8::1", "10.0.0.7:8000", "[fe80::1]:8000"),
    *(
        "a",
        "localhost.example.org",
        "127.0.0.1.example.org",
        "notlocalhost",
        "127.example.org:80",
        "127.0.0.256",
    ),
)


@pytest.mark.parametrize("host", HERE)
def test_this_machine(host: str) -> None:
    assert is_here(host)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_another_machine_or_none(host: str) -> None:
    assert not is_here(host)


def test_a_server_on_every_address_is_reached_on_the_loopback_one() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.7", "localhost")] == [
        *("127.0.0.1", "::1", "10.0.0.7", "localhost")
    ]
