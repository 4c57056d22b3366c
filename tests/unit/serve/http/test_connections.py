"""Strangers who are too slow or too many, or fill the memory; and others, who must not notice."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from firstlight.base.client_limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES
from firstlight.engine.messages import Submit
from firstlight.serve.http.connections import Guard
from support.api_server import ApiServer, says, wait_until
from support.byte_text import END, tokens
from support.fake_engine import DEADLINE_S, Script
from support.raw_http import CHAT, HEAD, connect, error_in, filled, post, read_all, send
from support.tls import write_tls_files

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=[(), ("secret",)], ids=["open", "with keys"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    with ApiServer(says("ok"), keys=request.param) as running:
        yield running


def test_a_head_up_to_the_limit_is_read_and_one_byte_more_is_431(server: ApiServer) -> None:
    with connect(server) as raw:
        send(raw, filled(MAX_HEAD_BYTES))
        assert raw.recv(12) == b"HTTP/1.1 200"
    with connect(server) as raw:
        send(raw, filled(MAX_HEAD_BYTES + 1))
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    error = error_in(answer)
    assert (error["code"], error["type"]) == ("headers_too_large", "invalid_request_error")
    assert f"{MAX_HEAD_BYTES} bytes" in error["message"]


def test_one_long_header_is_cut_off_before_the_parser_has_it(server: ApiServer) -> None:
    """In small pieces, which a parser without a limit puts together again and again; others are served."""
    piece = b"a" * 16384
    with connect(server) as raw, server.http() as http:
        send(raw, HEAD + b"X: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100_000_000:
                raw.sendall(piece)
                sent += len(piece)
        assert sent < 100_000_000
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"X: 1\r\n" * MAX_HEADERS + b"\r\n", 431),
        (b"GET /" + b"a" * MAX_TARGET_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"\r\n" * MAX_HEAD_BYTES, 431),
        (b"what is this?\r\n\r\n", 400),
    ],
)
def test_heads_that_are_refused(server: ApiServer, data: bytes, status: int) -> None:
    with connect(server) as raw:
        send(raw, data)
        answer = read_all(raw)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert error_in(answer)["message"]
    assert f'path="none",status="{status}"'.encode() in server.metrics.scrape()


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"X: 1\r\n" * (MAX_HEADERS - 1) + b"\r\n",
        b"GET /health?" + b"a" * (MAX_TARGET_BYTES - len("/health?")) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"\r\n\r\n" + HEAD + b"\r\n",
    ],
)
def test_heads_within_the_limits_are_served(server: ApiServer, data: bytes) -> None:
    with connect(server) as raw:
        send(raw, data)
        assert raw.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("after", [b"0\r\nX: ", b"1;x="], ids=["trailer", "extension"])
def test_what_follows_or_divides_a_body_has_the_limit_of_a_head(server: ApiServer, after: bytes) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with connect(server) as raw:
        send(raw, head.encode() + after + b"a" * (2 * MAX_HEAD_BYTES))
        assert read_all(raw).startswith(b"HTTP/1.1 431 ")


def test_trailers_are_no_headers() -> None:
    with ApiServer(says("ok"), keys=["secret"]) as server, connect(server) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        send(raw, head.encode() + b"0\r\nAuthorization: Bearer secret\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 401"


def test_a_queue_of_requests_on_one_connection_is_bounded(server: ApiServer) -> None:
    with connect(server) as raw:
        send(raw, (HEAD + b"\r\n") * 5000)
        answer = read_all(raw)
    assert 1 <= answer.count(b"HTTP/1.1 200 OK") <= 40


def test_bodies_together_have_a_limit_and_whoever_holds_most_is_refused() -> None:
    guard = Guard()
    guard.max_held_bytes = 100
    large, small = (_Guest(size) for size in (90, 9))
    for guest in (large, small):
        assert guard.seats.take(guest)
        assert guard.hold(guest, guest.num_held_bytes) is None
    assert guard.hold(small, 2) is large
    guard.release(90)
    assert guard.hold(small, 5) is None


class _Guest:
    def __init__(self, num_held_bytes: int) -> None:
        self.num_held_bytes = num_held_bytes

    def give_way(self) -> None:
        raise AssertionError


def test_unfinished_bodies_do_not_fill_the_memory() -> None:
    """Each within --max-body, and all of them forty times as much: some are refused, others are served."""
    size = 1024 * 1024
    with ApiServer(says("ok"), max_body_bytes=size) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(40)]
        for client in clients:
            client.setblocking(False)
            threading.Thread(target=_push, args=(client, post(b" " * (size - 1), size)), daemon=True).start()
        wait_until(lambda: b'status="503"' in server.metrics.scrape(), "refused")
        with server.http() as http:
            assert http.post(CHAT, json={"messages": USER}).status_code == 200


def _push(client: socket.socket, data: bytes) -> None:
    client.settimeout(DEADLINE_S)
    with contextlib.suppress(OSError):
        client.sendall(data)


# --- too slow ---


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /hea", HEAD, b"\r\n", HEAD + b"X: " + b"a" * 1000],
    ids=lambda sent: f"{len(sent)} bytes",
)
def test_no_whole_head_in_time_is_408(sent: bytes) -> None:
    with ApiServer(header_timeout_s=0.3) as server, connect(server) as raw:
        send(raw, sent)
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        error = error_in(answer)
        assert error["code"] == "request_too_slow"
        assert "0.3 s (--header-timeout)" in error["message"]
        assert b'path="none",status="408"' in server.metrics.scrape()


def test_a_trickle_does_not_move_the_deadline() -> None:
    with ApiServer(header_timeout_s=0.5) as server, connect(server) as raw:
        stopped = threading.Event()

        def trickle() -> None:
            while not stopped.wait(0.05):
                send(raw, b"a")

        send(raw, HEAD + b"X: ")
        writer = threading.Thread(target=trickle)
        writer.start()
        try:
            assert read_all(raw).startswith(b"HTTP/1.1 408 ")
        finally:
            stopped.set()
            writer.join()


def test_a_second_head_has_its_deadline_too() -> None:
    with ApiServer(header_timeout_s=0.5) as server, connect(server) as raw:
        send(raw, HEAD + b"\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        send(raw, b"GET /")
        assert read_all(raw).startswith(b"HTTP/1.1 408 ")


def test_no_whole_body_in_time_is_408() -> None:
    with ApiServer(body_timeout_s=0.3) as server, connect(server) as raw:
        send(raw, post(b"{", 100))
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert "0.3 s (--body-timeout)" in error_in(answer)["message"]
        # counted once as what it is, and not as a client that left
        wait_until(lambda: f'path="{CHAT}",status="408"'.encode() in server.metrics.scrape(), "counted")
        assert b'status="499"' not in server.metrics.scrape()


def test_a_body_that_nobody_wants_is_not_awaited_for_ever() -> None:
    with ApiServer(body_timeout_s=0.3, keys=["secret"]) as server, connect(server) as raw:
        send(raw, post(b"{", 10**9))
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_reads_no_answers_is_dropped() -> None:
    """Without a key: the description of the API is open, and no deadline of a request holds for it."""
    with ApiServer(body_timeout_s=0.5, keys=["secret"]) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        raw.settimeout(DEADLINE_S)
        with pytest.raises(ConnectionError):
            raw.sendall(request * 1_000_000)


def test_a_long_answer_is_not_cut_off_by_the_deadlines_of_requests() -> None:
    with ApiServer(_held, header_timeout_s=0.2, body_timeout_s=0.2) as server, connect(server) as raw:
        body = json.dumps({"messages": USER}).encode()
        send(raw, post(body) + b"GET /hea")  # and the beginning of another, which may wait as long
        server.engine.wait_for(Submit)
        threading.Timer(1.0, server.engine.release).start()
        assert raw.recv(12) == b"HTTP/1.1 200"


def _held(_: Submit) -> Script:
    return Script(tokens("done"), END, held=True)


# --- too many ---


def test_a_thousand_half_sent_requests_and_silent_connections_hold_up_nobody(server: ApiServer) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(450):  # of both kinds: nine hundred and more would need a raised limit of files
            raw = stack.enter_context(connect(server))
            send(raw, (b"", HEAD + b"X: a", post(b"{", 1000))[number % 3])
        with server.http(headers={"authorization": "Bearer secret"}) as http:
            for _ in range(20):
                assert http.post(CHAT, json={"messages": USER}).status_code == 200


def test_who_has_not_asked_anything_gives_way_to_who_comes() -> None:
    with ApiServer(says("ok"), max_connections=8) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(20)]
        with server.http() as http:
            assert http.post(CHAT, json={"messages": USER}).status_code == 200
        assert read_all(silent[0]).startswith(b"HTTP/1.1 503 ")  # the one that has waited longest


def test_a_seat_at_work_is_not_taken_and_one_more_is_told_so() -> None:
    with ApiServer(_held, max_connections=2) as server, contextlib.ExitStack() as stack:
        body = json.dumps({"messages": USER}).encode()
        at_work = [stack.enter_context(connect(server)) for _ in range(2)]
        for raw in at_work:
            send(raw, post(body))
        wait_until(lambda: len(server.engine.received(Submit)) == 2, "at work")
        with connect(server) as raw:
            answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert (error_in(answer)["code"], b"retry-after: 1" in answer) == ("too_many_connections", True)
        server.engine.release()
        for raw in at_work:
            assert raw.recv(12) == b"HTTP/1.1 200"


# --- other ways in ---


def test_a_handshake_that_does_not_end_is_ended_and_holds_up_nobody(tmp_path: Path) -> None:
    certificate, key = write_tls_files(tmp_path)
    options = {"tls_cert": str(certificate), "tls_key": str(key)}
    with ApiServer(header_timeout_s=0.5, max_connections=4, **options) as server:
        trust = ssl.create_default_context(cafile=str(certificate))
        with contextlib.ExitStack() as stack:
            begun = [stack.enter_context(connect(server)) for _ in range(10)]
            for raw in begun:
                send(raw, b"\x16\x03\x01")
            answer = httpx.get(f"{server.url}/health", verify=trust, trust_env=False, timeout=DEADLINE_S)
            assert answer.status_code == 200
            for raw in begun:
                read_all(raw)  # returns as the server closes


def test_a_unix_socket_has_the_same_limits(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with ApiServer(uds=path, header_timeout_s=0.3):
        for sent, status in ((b"GET /", 408), (filled(MAX_HEAD_BYTES + 1), 431)):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(DEADLINE_S)
                raw.connect(path)
                send(raw, sent)
                assert read_all(raw).startswith(f"HTTP/1.1 {status} ".encode())
