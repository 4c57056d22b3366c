"""What a hostile or broken client may do to a connection, and that the others do not notice.

Raw sockets against the real server: nothing here is a proper client. Times are cut short by setting them.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from firstlight.base import client_limits
from firstlight.engine.messages import Submit
from firstlight.serve.http import connections
from support.api_server import ApiServer, says

DEADLINE_S = 30.0
START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4}).encode()
WHOLE = START + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
KNOWN = START + b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
KNOWN += b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED = START + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def connect(server: ApiServer) -> socket.socket:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), DEADLINE_S)


class _Received:
    """A response from bytes that have arrived already."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, *_: Any) -> io.BytesIO:
        return self._file


def read_all(client: socket.socket) -> bytes:
    """Until the server closes, whether politely or not."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            parts.append(data)
    return b"".join(parts)


def refusal(data: bytes) -> tuple[int, str]:
    """Status and code of the last answer, which closes."""
    last = data[data.rindex(b"HTTP/1.1 ") :]
    response = http.client.HTTPResponse(_Received(last))  # type: ignore[arg-type]
    response.begin()
    assert response.headers["connection"] == "close"
    return response.status, json.loads(response.read())["error"]["code"]


def sent(client: socket.socket, data: bytes, times: int = 1) -> bytes:
    """What comes back, be it that the server stops to read before all is sent."""
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(read_all(client)))
    reader.start()
    with contextlib.suppress(OSError):
        for _ in range(times):
            client.sendall(data)
    reader.join(DEADLINE_S)
    return received[0]


def is_served(server: ApiServer, **headers: str) -> bool:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=json.loads(BODY), headers=headers, timeout=DEADLINE_S
    )
    return answer.is_success


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(says("Hello!")) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[ApiServer]:
    with ApiServer(says("Hello!"), header_timeout_s=0.2, body_timeout_s=0.2) as running:
        yield running


MEGABYTE = b"a" * 2**20


@pytest.mark.parametrize(
    ("head", "piece", "times", "expected"),
    [
        (START + b"X-Long: ", MEGABYTE, 300, (431, "headers_too_large")),
        (START + MEGABYTE, MEGABYTE, 100, (431, "headers_too_large")),  # the name of a header
        (START, b"X-A: b\r\n" * 1000, 100, (431, "too_many_headers")),
        (b"GET /", MEGABYTE, 100, (414, "target_too_long")),
        (b"", b"\r\n" * 2**19, 100, (431, "headers_too_large")),
        (KNOWN + b"0\r\nX-Trailer: ", MEGABYTE, 100, (431, "headers_too_large")),
        (KNOWN + b"5;x=", MEGABYTE, 100, (431, "headers_too_large")),  # a chunk's extension
        (b"\x16\x03\x01 this is TLS", b"", 1, (400, "invalid_http")),
    ],
)
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_what_is_too_large_is_refused_early_and_nobody_else_waits(
    head: bytes, piece: bytes, times: int, expected: tuple[int, str], keys: tuple[str, ...]
) -> None:
    with ApiServer(says("Hello!"), keys=keys) as server, connect(server) as client:
        client.sendall(head)
        assert refusal(sent(client, piece, times)) == expected
        assert is_served(server, Authorization="Bearer secret")


def test_heads_within_the_limits_are_served(server: ApiServer) -> None:
    many = "".join(f"X-{number}: {'v' * 100}\r\n" for number in range(client_limits.MAX_HEADERS - 10))
    with connect(server) as client:
        client.sendall(START + many.encode() + WHOLE[len(START) :])
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    with connect(server) as client:
        client.sendall(b"GET /v1/models?x=" + b"y" * 15_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_a_trailer_is_no_header() -> None:
    with ApiServer(says("Hello!"), keys=("secret",)) as server, connect(server) as client:
        body = b"%x\r\n%b\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" % (len(BODY), BODY)
        client.sendall(CHUNKED + body)
        assert client.recv(12) == b"HTTP/1.1 401"


def test_a_head_in_single_bytes_is_served(server: ApiServer) -> None:
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(len(WHOLE)):
            client.sendall(WHOLE[position : position + 1])
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_requests_in_one_piece_are_answered_in_order_until_one_is_none(server: ApiServer) -> None:
    with connect(server) as client:
        received = sent(client, WHOLE + WHOLE + b"\x00\x01")
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b'"finish_reason"') == 2


@pytest.mark.parametrize(
    "data", [b"", b"GET", START + b"X: y\r\n", WHOLE[:-3], CHUNKED + b"5\r\nab", b"\r\n"]
)
@pytest.mark.parametrize("before", [b"", WHOLE])
def test_who_does_not_go_on_is_told_and_let_go(impatient: ApiServer, data: bytes, before: bytes) -> None:
    if before and not data:
        return  # an idle connection that was used: uvicorn closes it, after a longer time
    with connect(impatient) as client:
        if before:
            client.sendall(before)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.read()
        client.sendall(data)
        assert refusal(read_all(client)) == (408, "request_too_slow")


def test_a_large_body_at_a_fair_rate_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_BODY_BYTES_PER_S", len(BODY) / DEADLINE_S)
    with ApiServer(says("Hello!"), body_timeout_s=0.05) as server, connect(server) as client:
        client.sendall(WHOLE[:-2])
        time.sleep(0.3)  # longer than the grace, but most of the body has come
        client.sendall(WHOLE[-2:])
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_the_longest_half_request_gives_way() -> None:
    with ApiServer(says("Hello!"), max_connections=8) as server, contextlib.ExitStack() as opened:
        halves = [opened.enter_context(connect(server)) for _ in range(40)]
        for one in halves:
            one.sendall(START)
        assert is_served(server)
        assert refusal(read_all(halves[0])) == (503, "too_many_connections")
        for one in halves:
            one.close()
        assert is_served(server)


def test_an_idle_connection_gives_way_quietly_and_a_busy_one_does_not() -> None:
    with ApiServer(says("Hello!", held=True), max_connections=2) as server, connect(server) as idle:
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(12) == b"HTTP/1.1 200"
        with connect(server) as first, connect(server) as second:
            for number, busy in enumerate((first, second), 1):
                busy.sendall(WHOLE)
                server.engine.wait_for(Submit, number)
            read_all(idle)  # it was closed
            with connect(server) as third:
                assert refusal(read_all(third)) == (503, "too_many_connections")
            server.engine.release()
            assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"


def test_refusals_are_logged_in_few_lines(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        with connect(server) as client:
            assert refusal(sent(client, b"\x00")) == (400, "invalid_http")
    assert len([record for record in caplog.records if "connections refused" in record.message]) <= 3
