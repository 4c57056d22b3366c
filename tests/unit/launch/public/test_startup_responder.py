"""The 503 that is there from the first moment, asked by raw clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from firstlight.base.failure import Failure
from firstlight.launch.public import startup_responder as front_module
from firstlight.launch.public.startup_responder import Front, Picture
from firstlight.launch.serve import restarting
from firstlight.launch.verdict import Verdict
from support.tls import write_tls_files

LOADING = Picture(
    "starting",
    "The model is not ready yet: rank 0 is in phase weights, 1.2 GB of 5.4 GB (22 %), about 12 s left.",
    12,
    {"status": "starting", "phase": "weights"},
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def front(listener: socket.socket) -> Iterator[Front]:
    made = Front()
    made.open(listener)
    yield made
    made.close()


def ask(listener: socket.socket, path: str, method: str = "GET", **options: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*listener.getsockname(), timeout=5)
    connection.request(method, path, **options)
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def test_every_api_path_answers_503_with_the_phase_and_the_time_left(
    front: Front, listener: socket.socket
) -> None:
    front.publish(LOADING)
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/health")):
        response = ask(listener, path, method)
        error = json.loads(response.body)["error"]  # type: ignore[attr-defined]
        assert response.status == 503
        assert (response.headers["Retry-After"], response.headers["Connection"]) == ("12", "close")
        assert (error["message"], error["type"], error["code"]) == (
            LOADING.message,
            "server_error",
            "starting",
        )


def test_liveness_and_the_picture(front: Front, listener: socket.socket) -> None:
    front.publish(LOADING)
    assert ask(listener, "/health/live").status == 200
    response = ask(listener, "/startup?x=1")
    shown = json.loads(response.body)  # type: ignore[attr-defined]
    assert shown.pop("elapsed_s") >= 0
    assert shown == LOADING.startup
    assert ask(listener, "/health", "HEAD").body == b""  # type: ignore[attr-defined]


def test_a_lost_engine_is_not_alive_but_one_that_is_started_again_is(
    front: Front, listener: socket.socket
) -> None:
    front.publish(Picture("lost", "rank 0 was ended by SIGKILL.", startup={"status": "lost"}))
    answer = ask(listener, "/health/live")
    assert (answer.status, b"SIGKILL" in answer.body) == (503, True)  # type: ignore[attr-defined]
    end = Verdict(6, Failure("rank 0 was ended by SIGKILL.", "", 6))
    front.publish(restarting(end, "starting again in 2 s (1 of 5)"))
    assert ask(listener, "/health/live").status == 200
    assert b"SIGKILL. The engine is starting again" in ask(listener, "/v1/models").body  # type: ignore[attr-defined]


def test_the_verdict_is_the_last_event_of_a_front_that_ends(listener: socket.socket) -> None:
    front = Front(LOADING)
    front.open(listener)
    with socket.create_connection(listener.getsockname(), timeout=10) as connection:
        connection.sendall(b"GET /startup/events HTTP/1.1\r\nHost: x\r\n\r\n")
        received = connection.recv(65536)
        while b"event: progress" not in received:
            received += connection.recv(65536)
        front.publish(Picture("failed", "rank 0 is gone.", startup={"status": "failed", "why": "gone"}))
        front.close()
        while data := connection.recv(65536):
            received += data
    assert received.count(b"event: failed") == 1
    assert received.rstrip().endswith(b"}")


def test_events_end_with_ready(front: Front, listener: socket.socket) -> None:
    received: list[bytes] = []
    reader = threading.Thread(
        target=lambda: received.append(ask(listener, "/startup/events").body)  # type: ignore[attr-defined]
    )
    reader.start()
    time.sleep(0.1)
    front.publish(LOADING)
    time.sleep(0.5)
    front.publish(Picture("ready", "", 1, {"status": "ready"}))
    reader.join(5)
    events = [block for block in received[0].decode().split("\n\n") if block.startswith("event:")]
    assert [block.partition("\n")[0] for block in events] == [
        "event: progress",
        "event: progress",
        "event: ready",
    ]
    assert json.loads(events[1].partition("data: ")[2]).items() >= LOADING.startup.items()


def test_keys_are_asked_for_except_by_probes(listener: socket.socket) -> None:
    front = Front()
    front.protect(["secret", "other"])
    front.open(listener)
    try:
        assert ask(listener, "/startup").status == 401
        assert ask(listener, "/v1/models", headers={"Authorization": "Bearer wrong"}).status == 401
        assert ask(listener, "/startup", headers={"authorization": "bearer other"}).status == 200
        assert (ask(listener, "/health").status, ask(listener, "/health/live").status) == (503, 200)
    finally:
        front.close()


def test_a_client_that_sends_a_large_body_gets_its_answer(front: Front, listener: socket.socket) -> None:
    response = ask(listener, "/v1/completions", "POST", body=b"x" * 5_000_000)
    assert response.status == 503


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\r\n\r\n", b"hello\r\n\r\n"])
def test_what_is_not_http_is_refused(front: Front, listener: socket.socket, sent: bytes) -> None:
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        client.sendall(sent)
        assert client.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 256 + b"\r\n", 431),
        (b"GET /" + b"x" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    ],
)
def test_heads_that_are_refused(front: Front, listener: socket.socket, sent: bytes, status: int) -> None:
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        client.sendall(sent)
        assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_streams_of_events_leave_room_for_others(
    front: Front, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "_MAX_WATCHERS", 2)
    watchers = []
    for _ in range(2):
        watchers.append(socket.create_connection(listener.getsockname(), timeout=30))
        watchers[-1].sendall(b"GET /startup/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert watchers[-1].recv(12) == b"HTTP/1.1 200"
    assert ask(listener, "/startup/events").status == 503
    assert ask(listener, "/startup/events", "HEAD").status == 200
    assert ask(listener, "/health/live").status == 200
    for client in watchers:
        client.close()


def test_slashes_too_many_change_nothing(front: Front, listener: socket.socket) -> None:
    assert [ask(listener, path).status for path in ("/health//live", "/startup/")] == [200, 200]


def test_a_handshake_that_does_not_end_is_ended(
    listener: socket.socket, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "_HEAD_DEADLINE_S", 0.3)
    certificate, key = write_tls_files(tmp_path)
    front = Front()
    front.protect([], str(certificate), str(key))
    front.open(listener)
    try:
        with socket.create_connection(listener.getsockname(), timeout=30) as client:
            client.sendall(b"\x16\x03\x01")
            with contextlib.suppress(ConnectionError):
                assert client.recv(100) == b""
    finally:
        front.close()


def test_a_head_that_does_not_come_is_told_so(
    front: Front, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "_HEAD_DEADLINE_S", 0.1)
    for sent in (b"", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            client.sendall(sent)
            assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_half_requests_give_way_to_whole_ones(
    front: Front, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "_MAX_CONNECTIONS", 8)
    with contextlib.ExitStack() as opened:
        for _ in range(40):
            half = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
            half.sendall(b"GET / HTTP/1.1\r\n")
        assert ask(listener, "/health").status == 503
        assert ask(listener, "/health/live").status == 200


def test_silent_clients_hold_up_nobody(front: Front, listener: socket.socket) -> None:
    silent = [socket.create_connection(listener.getsockname()) for _ in range(50)]
    started_s = time.monotonic()
    assert ask(listener, "/health").status == 503
    assert time.monotonic() - started_s < 2
    for client in silent:
        client.close()


def test_after_a_pause_connections_wait_for_who_accepts_next(front: Front, listener: socket.socket) -> None:
    front.pause()
    listener.settimeout(5)
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        accepted, _ = listener.accept()
        accepted.close()
    listener.setblocking(False)
    front.open(listener)
    assert ask(listener, "/health").status == 503


def test_tls(listener: socket.socket, tmp_path: Any) -> None:
    import ssl

    certificate, key = write_tls_files(tmp_path)
    front = Front()
    front.protect([], str(certificate), str(key))
    front.open(listener)
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(
            "localhost", listener.getsockname()[1], context=context, timeout=5
        )
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503
        connection.close()
    finally:
        front.close()


def test_whoever_is_accepted_while_it_pauses_is_answered(front: Front, listener: socket.socket) -> None:
    """By it, or from the kernel's queue by who accepts next."""
    for _ in range(50):
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            client.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            front.pause()
            front.open(listener)
            assert client.recv(64).startswith(b"HTTP/1.1 200")


def test_time_goes_on_although_nothing_is_published(front: Front, listener: socket.socket) -> None:
    front.begin(time.monotonic() - 40)
    first = json.loads(ask(listener, "/startup").body)["elapsed_s"]  # type: ignore[attr-defined]
    assert first >= 40
    deadline = time.monotonic() + 10
    while json.loads(ask(listener, "/startup").body)["elapsed_s"] <= first:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
