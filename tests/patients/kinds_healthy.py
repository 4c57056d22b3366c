"""Patients that are well: idle, at work, or slow for a reason that passes.

Listed by `kinds`. A verdict of stuck or dead on any of them is a false alarm. Invariant: nothing is wrong
with them, and what makes them look as if it were is real.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

from patients.foreign_servers import Foreign
from patients.models import LARGE, TINY
from patients.native import SLOW_TO_JUDGE, Load, Server, box, change
from patients.patient import Kind, Patient, Unavailable, Ward, until

_IDLE = frozenset({"idle"})
_AT_WORK = frozenset({"working", "idle"})
_HEALTHY = frozenset({"healthy"})
_STARTING = frozenset({"starting", "slow"})
_SHARED = "the runner makes two patients at a time: the processors may really be short"
_BETWEEN = "between two requests of its clients it is idle for a moment, and that may be when it is seen"


def _idle(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY).ready()
    time.sleep(ward.random.uniform(0.0, 2.0))
    return server.patient()


def _idle_ranks(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY, "--tensor-parallel", "2").ready()
    time.sleep(ward.random.uniform(0.0, 2.0))
    return server.patient()


def _idle_foreign(ward: Ward) -> Patient:
    style = ward.random.choice(["vllm", "sglang"])
    server = Foreign(ward, style, ward.models / TINY, 2).ready()
    server.ask()
    time.sleep(ward.random.uniform(0.0, 1.0))
    return server.patient(style)


def _loaded(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY).ready()
    load = Load(ward, server, ward.random.randrange(1, 5), max_tokens=ward.random.randrange(16, 256))
    until(lambda: load.num_done, "an answer")
    return server.patient()


def _long_prefill(ward: Ward) -> Patient:
    """Prompts of thousands of tokens, one after the other."""
    server = Server(ward, ward.models / TINY, "--max-batched-tokens", "8192").ready()
    length = ward.random.randrange(6_000, 14_000)
    _keep_asking(ward, server, length)
    time.sleep(ward.random.uniform(0.2, 1.5))
    return server.patient(f"{length} tokens")


def _keep_asking(ward: Ward, server: Server, length: int) -> None:
    """Long prompts, each of them another one."""
    is_over = threading.Event()
    ward.stack.callback(is_over.set)

    def ask() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                server.ask(prompt=f"{number} " + "x" * length, max_tokens=1)

    threading.Thread(target=ask, daemon=True).start()


def _between_hogs(ward: Ward) -> Patient:
    """A start while others use all processors."""
    for _ in range(2 * (os.cpu_count() or 1)):
        ward.spawn(["sh", "-c", "while :; do :; done"], {})
    server = Server(ward, ward.models / TINY).started()
    server.pid("rank-0")
    time.sleep(ward.random.uniform(0.0, 5.0))
    return server.patient()


def _starting(ward: Ward) -> Patient:
    server = Server(ward, ward.models / LARGE).started()
    time.sleep(ward.random.uniform(0.0, 1.5))
    return server.patient()


def _computes_first(ward: Ward) -> Patient:
    """A long computation of one process, in pure Python, before the weights: no odometer moves."""
    mistake = change("rank", "firstlight.engine.worker.startup", "long_tables", seconds=40)
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, variables=mistake).started()
    server.until_phase("rank-0", "device")
    time.sleep(ward.random.uniform(1.0, 15.0))
    return server.patient()


def _was_debugged(ward: Ward) -> Patient:
    """gdb came and went."""
    if shutil.which("gdb") is None:
        raise Unavailable("gdb is not installed")
    server = Server(ward, ward.models / TINY).ready()
    is_loaded = ward.random.random() < 0.5
    if is_loaded:
        Load(ward, server)
    pid = server.pid("rank-0")
    command = ["gdb", "-nx", "-batch", "-iex", "set auto-solib-add off", "-p", str(pid), "-ex", "detach"]
    subprocess.run(command, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    return server.patient("under load" if is_loaded else "idle")


def _drained(ward: Ward) -> Patient:
    """All requests are done, and nobody asks any more."""
    server = Server(ward, ward.models / TINY).ready()
    for _ in range(ward.random.randrange(1, 6)):
        server.ask(max_tokens=ward.random.randrange(1, 200))
    return server.patient()


def _stopping(ward: Ward) -> Patient:
    """It was asked to end, and finishes what it runs."""
    server = Server(ward, ward.models / TINY, "--drain", "60").ready()
    Load(ward, server, 1, max_tokens=16000, prompt="y")
    until(lambda: (found := box(server.run_dir, "rank-0")) and found.running, "a running request")
    time.sleep(ward.random.uniform(0.1, 0.5))
    server.process.send_signal(signal.SIGTERM)
    until(lambda: (found := box(server.run_dir, "rank-0")) and found.phases[-1].name == "drain", "the drain")
    return server.patient()


def _slow_reader(ward: Ward) -> Patient:
    """A client takes its stream in sips; the server is far ahead of it, or waits for it."""
    server = Server(ward, ward.models / TINY).ready()
    connection = ward.stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"prompt": "x", "max_tokens": 12000, "ignore_eos": True, "stream": True}).encode()
    headers = ("Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", ""))
    connection.sendall(head.encode() + body)
    is_over = threading.Event()
    ward.stack.callback(is_over.set)

    def sip() -> None:
        while not is_over.wait(0.5):
            with contextlib.suppress(OSError):
                connection.recv(128)

    threading.Thread(target=sip, daemon=True).start()
    time.sleep(ward.random.uniform(1.0, 8.0))
    return server.patient()


def _was_stopped(ward: Ward) -> Patient:
    """SIGSTOP and SIGCONT of a rank: it has recovered."""
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE).ready()
    if ward.random.random() < 0.5:
        Load(ward, server)
    pid = server.pid("rank-0")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(ward.random.uniform(0.1, 0.9))
    os.kill(pid, signal.SIGCONT)
    return server.patient()


def _buffered_log(ward: Ward) -> Patient:
    """A foreign server prints into a pipe that holds it back, and answers all the while."""
    reader = ward.spawn(["cat"], {}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    server = Foreign(ward, "sglang", ward.models / TINY, 2, stdout=reader.stdin)
    reader.stdin.close()
    server.ready()
    is_over = threading.Event()
    ward.stack.callback(is_over.set)

    def ask() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.ask(50)

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(ward.random.uniform(0.5, 3.0))
    return server.patient()


KINDS = (
    Kind(
        name="idle",
        is_quick=True,
        what="a server of ours that nobody asks anything",
        start=_idle,
        causes=_IDLE,
        conditions=_HEALTHY,
        is_steady=True,
    ),
    Kind(
        name="idle-ranks",
        what="a server of two ranks that nobody asks anything",
        start=_idle_ranks,
        causes=_IDLE,
        conditions=_HEALTHY,
        is_steady=True,
    ),
    Kind(
        name="idle-foreign",
        is_quick=True,
        what="a foreign server that nobody asks anything",
        start=_idle_foreign,
        causes=_IDLE,
        conditions=_HEALTHY,
        is_steady=True,
    ),
    Kind(
        name="loaded",
        is_quick=True,
        what="a server under steady load",
        start=_loaded,
        causes=_AT_WORK,
        conditions=_HEALTHY,
        why=_BETWEEN,
        is_steady=True,
    ),
    Kind(
        name="long-prefill",
        what="prompts of thousands of tokens in steps that take long",
        start=_long_prefill,
        causes=_AT_WORK,
        conditions=_HEALTHY,
        why=_BETWEEN,
        is_steady=True,
    ),
    Kind(
        name="start-between-hogs",
        what="a start while other programs use every processor",
        start=_between_hogs,
        causes=frozenset({"on-its-way", "processor-starved"}),
        conditions=_STARTING,
        why="it is on its way, and the reason why it takes long may be named",
        settle_s=0.0,
    ),
    Kind(
        name="start-of-large-model",
        what="the first seconds of a larger model",
        start=_starting,
        causes=frozenset({"on-its-way", "processor-starved"}),
        conditions=_STARTING,
        why=_SHARED,
        settle_s=0.0,
    ),
    Kind(
        name="computes-before-weights",
        what="a start that computes tables in Python for most of a minute",
        start=_computes_first,
        causes=frozenset({"on-its-way", "processor-starved"}),
        conditions=_STARTING,
        why=_SHARED,
    ),
    Kind(
        name="was-debugged",
        what="gdb attached to the rank and left",
        start=_was_debugged,
        causes=_AT_WORK,
        conditions=_HEALTHY,
        why=_BETWEEN,
        is_steady=True,
    ),
    Kind(
        name="drained",
        is_quick=True,
        what="its last request has just ended",
        start=_drained,
        causes=_IDLE,
        conditions=_HEALTHY,
        settle_s=0.0,
        is_steady=True,
    ),
    Kind(
        name="stopping",
        what="it was asked to end and finishes a long request",
        start=_stopping,
        causes=frozenset({"working", "processor-starved"}),
        conditions=frozenset({"healthy", "slow"}),
        why=_SHARED,
        settle_s=0.0,
    ),
    Kind(
        name="slow-reader",
        what="a client takes its stream in sips",
        start=_slow_reader,
        causes=_AT_WORK,
        conditions=_HEALTHY,
        why="the engine may have made all tokens before the client has read them",
        is_steady=True,
    ),
    Kind(
        name="stopped-and-continued",
        what="a rank was stopped for a moment and goes on",
        start=_was_stopped,
        causes=_AT_WORK,
        conditions=_HEALTHY,
        why=_BETWEEN,
        is_steady=True,
    ),
    Kind(
        name="log-buffered",
        is_quick=True,
        what="a foreign server's prints are held back in a buffer while it works",
        start=_buffered_log,
        causes=frozenset({"output-buffered", "working"}),
        conditions=_HEALTHY,
        why="it works, and that its log is silent is the only thing to say of it",
    ),
)
