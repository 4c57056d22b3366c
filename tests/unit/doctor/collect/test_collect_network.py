"""Collectors about sockets: peers, ports that are open, closed or silent, one token, and NCCL's own watch."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.doctor.case.target import HOST, RUN, Target
from firstlight.doctor.case.values_host import Generation, Gpus, HttpProbe, RequestLoad, Sockets
from firstlight.doctor.collect.gpus import GPUS
from firstlight.doctor.collect.probes import GENERATION, HTTP, LOAD, Request, ask
from firstlight.doctor.collect.ras import ask as ask_ras
from firstlight.doctor.collect.ras import parse_report
from firstlight.doctor.collect.scene import Options, Scene
from firstlight.doctor.collect.sockets import SOCKETS
from support.doctor_scenes import child, living, look, target, the
from support.tls import tls_server

ANSWERS = {
    "/health": (503, "Retry-After: 7\r\n", '{"error":"loading"}'),
    "/v1/models": (200, "", '{"data":[{"id":"m"}]}'),
    "/v1/completions": (200, "", '{"choices":[{"text":"!"}]}'),
    "/metrics": (200, "", 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting 3.0\n'),
}


@contextlib.contextmanager
def server(*, is_silent: bool = False) -> Iterator[int]:
    """A server that answers from the table above, or accepts and says nothing. Gives its port."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    kept: list[socket.socket] = []

    def serve() -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                kept.append(connection)
                if not is_silent:
                    _answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join()
        for one in (*kept, listener):
            one.close()


def _answer(connection: socket.socket) -> None:
    connection.settimeout(5)
    head = connection.recv(65536).decode()
    status, headers, body = ANSWERS.get(head.split()[1], (404, "", "{}"))
    connection.sendall(f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    connection.close()


def at(port: int) -> Target:
    return target(addresses=(("127.0.0.1", port),))


def test_an_answer_is_taken_without_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server() as port:
        found = look(at(port), [HTTP, LOAD])
    first = found.all(HttpProbe)[0].value
    assert (first.outcome, first.status, first.retry_after_s) == ("answered", 503, 7.0)
    assert "loading" in first.body
    other = found.all(HttpProbe)[1].value
    assert (other.address, other.outcome) == ("::1", "refused")
    load = the(found, RequestLoad, RUN)
    assert (load.running, load.waiting) == (2, 3)


def test_one_token_only_if_it_is_allowed() -> None:
    with server() as port:
        silent = list(GENERATION.collect(Scene(at(port))))
        (seen,) = GENERATION.collect(Scene(at(port), options=Options(with_generation=True)))
    assert silent == []
    assert isinstance(seen.value, Generation)
    assert seen.value.has_token


def test_a_closed_port_and_one_that_says_nothing() -> None:
    with server(is_silent=True) as port:
        assert ask(Request("127.0.0.1", port, "/health"), timeout_s=0.2).outcome == "silent"
    assert ask(Request("127.0.0.1", port, "/health"), timeout_s=0.2).outcome == "refused"


def test_a_port_that_closes_without_a_word_is_asked_with_tls(tmp_path: Path) -> None:
    with tls_server(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as port:
        answer = ask(Request("127.0.0.1", port, "/health"))
    assert (answer.outcome, answer.status, answer.body) == ("answered", 200, "ok")


def test_sockets_with_their_peers_and_queues() -> None:
    code = (
        "import socket, sys\n"
        "a = socket.create_connection(('127.0.0.1', int(sys.stdin.readline())))\n"
        "a.sendall(b'12345'); b, c = socket.socketpair(); print('up', flush=True); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, child(code) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{listener.getsockname()[1]}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
        accepted, _ = listener.accept()
        with accepted:
            found = look(
                target(living(process.pid, "rank-0"), addresses=(listener.getsockname(),)), [SOCKETS]
            )
    seen = the(found, Sockets, RUN)
    (tcp,) = [end for end in seen.sockets if end.protocol == "tcp" and end.state == "ESTABLISHED"]
    assert (tcp.owners, tcp.peers) == (("rank-0",), ("doctor",))
    assert [end.owners for end in seen.sockets if end.state == "LISTEN"] == [("doctor",)]
    pair = [end for end in seen.sockets if end.protocol == "unix" and end.peers == ("rank-0",)]
    assert len(pair) == (2 if seen.has_unix_peers else 0)


REPORT = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
      1          8            1          8        8

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 77 on node 172.16.64.213 managing GPU 6

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210

#1-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""


def test_a_report_of_the_watch() -> None:
    report = parse_report(REPORT, "127.0.0.1:28028", "SERVER PROTOCOL 2")
    assert (report.dead_pids, report.unreachable_pids) == ((77,), (3487984,))
    missing, first, second = report.communicators
    assert (missing.status, missing.missing_ranks) == ("INCOMPLETE", (5,))
    assert [(count.num_ranks, count.launched, count.ranks) for count in first.counts] == [
        (6, 6650, ()),
        (2, 6649, (0, 2)),
    ]
    assert [(count.operation, count.launched, count.ranks) for count in second.counts] == [
        ("AllReduce", 64, ()),
        ("AllReduce", 60, (7,)),
    ]


def test_the_watch_is_asked_in_its_protocol() -> None:
    heard: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            heard.append(lines.readline())
            connection.sendall(b"SERVER PROTOCOL 2\n")
            heard.append(lines.readline())
            connection.sendall(REPORT.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        protocol, text = ask_ras("127.0.0.1", listener.getsockname()[1])
        thread.join()
    assert (protocol, text) == ("SERVER PROTOCOL 2", REPORT)
    assert heard == [b"CLIENT PROTOCOL 2\n", b"VERBOSE STATUS\n"]


def test_a_port_that_is_no_watch_has_its_deadline() -> None:
    with server(is_silent=True) as port, pytest.raises(TimeoutError):
        ask_ras("127.0.0.1", port, timeout_s=0.2)


def test_gpus_or_the_reason_why_there_are_none() -> None:
    found = look(target(), [GPUS])
    gpus = the(found, Gpus, HOST)
    assert gpus.note if gpus.gpus is None else all(gpu.name for gpu in gpus.gpus)
