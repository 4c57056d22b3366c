"""Seats, and the faults of a head."""

from __future__ import annotations

import pytest

from firstlight.base.client_limits import (
    MAX_HEADERS,
    MAX_TARGET_BYTES,
    NO_HOST,
    NO_HTTP,
    TARGET_TOO_LONG,
    TOO_MANY_HEADERS,
    Refusal,
    Seats,
    fault_of_head,
    plain_path,
)


class Guest:
    num_held_bytes = 0
    is_gone = False

    def give_way(self) -> None:
        self.is_gone = True


def test_whoever_has_waited_longest_gives_way_and_who_works_does_not() -> None:
    seats = Seats(3)
    first, second, third, fourth, fifth = (Guest() for _ in range(5))
    for guest in (first, second, third):
        assert seats.take(guest)
    seats.works(first)
    assert seats.take(fourth)
    assert [guest.is_gone for guest in (first, second, third)] == [False, True, False]
    seats.waits(first)  # its waiting begins anew
    assert seats.take(fifth)
    assert [guest.is_gone for guest in (first, third)] == [False, True]
    assert seats.num_taken == 3


def test_no_seat_while_everybody_works_and_one_when_somebody_leaves() -> None:
    seats = Seats(1)
    first, second = Guest(), Guest()
    assert seats.take(first)
    seats.works(first)
    assert not seats.take(second)
    seats.leave(first)
    assert seats.take(second)
    seats.works(first)  # who has left has no say
    seats.waits(first)
    assert seats.num_taken == 1


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        ("GET / HTTP/1.1\r\nHost: x\r\n", None),
        ("GET / HTTP/1.0\r\n", None),
        ("GET / HTTP/1.1\r\nX: Host\r\n", NO_HOST),
        ("GET / HTTP/1.1\r\nhost: x\r\nHOST: y\r\n", NO_HOST),
        ("GET /\r\nHost: x\r\n", NO_HTTP),
        ("hello", NO_HTTP),
        ("GET / HTTP/2.0\r\nHost: x", NO_HTTP),
        ("GET " + "/" * MAX_TARGET_BYTES + " HTTP/1.1\r\nHost: x", None),
        ("GET /" + "/" * MAX_TARGET_BYTES + " HTTP/1.1\r\nHost: x", TARGET_TOO_LONG),
        ("GET / HTTP/1.1\r\nHost: x" + "\r\nX: 1" * (MAX_HEADERS - 1), None),
        ("GET / HTTP/1.1\r\nHost: x" + "\r\nX: 1" * MAX_HEADERS, TOO_MANY_HEADERS),
    ],
    ids=lambda value: str(value)[:20],
)
def test_faults_of_heads(head: str, fault: Refusal | None) -> None:
    assert fault_of_head(head.split("\r\n")) == fault


@pytest.mark.parametrize(
    ("path", "plain"),
    [("/", "/"), ("//", "/"), ("/a", "/a"), ("/a/", "/a"), ("//a///b//", "/a/b"), ("*", "*"), ("", "")],
)
def test_plain_paths(path: str, plain: str) -> None:
    assert plain_path(path) == plain
