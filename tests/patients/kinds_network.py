"""Patients whose trouble is a port, a proxy, a host that does not answer, or another user's process.

Listed by `kinds`. Invariant: the other end is real: a listener that accepts nobody, a proxy that does not
answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_host import Sockets
from patients.foreign_servers import Foreign
from patients.models import TINY
from patients.native import SLOW_TO_JUDGE, Ranks, Server, change
from patients.patient import Kind, Patient, Ward, need_root, until, until_still
from patients.places import NOBODY, uncached_copy
from support.ports import free_port

_STUCK = frozenset({"stuck"})


class DeafHost:
    """An address whose SYNs are dropped: a listener with a full queue."""

    def __init__(self, ward: Ward) -> None:
        listener = ward.stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        self.port = int(listener.getsockname()[1])
        for _ in range(4):
            waiting = ward.stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", self.port))


def _hub(ward: Ward) -> Patient:
    host = DeafHost(ward)
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{host.port}", "HF_HUB_OFFLINE": "0"}
    variables |= {"HF_HOME": str(ward.folder / "hub"), "HF_HUB_ETAG_TIMEOUT": "600"}
    server = Server(ward, "somebody/some-model", variables=variables)
    until(
        lambda: "listening" in server.said() or _is_connecting(server.process.pid), "its start", every_s=0.05
    )
    until(lambda: _is_connecting(server.process.pid), "a connection that is not answered", every_s=0.05)
    pid = server.process.pid
    from firstlight.doctor.servers.discover import target_of_pid

    return Patient(lambda: target_of_pid(pid), ("--pid", str(pid)), time.monotonic())


def _is_connecting(pid: int) -> bool:
    """Whether a socket of it or of the children that look for files has sent a SYN and got nothing."""
    inodes = set()
    for one in (pid, *_children(pid)):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{one}/fd"):
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    rows = [row.split() for table in ("tcp", "tcp6") for row in _rows(table)]
    return any(row[3] == "02" and row[9] in inodes for row in rows)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
    return []


def _rows(table: str) -> list[str]:
    with open(f"/proc/net/{table}") as file:
        return file.readlines()[1:]


def _no_store(ward: Ward) -> Patient:
    """The address where ranks shall meet drops what is sent to it."""
    host = DeafHost(ward)
    mistake = change("rank", "firstlight.ops.collectives", "far_store", host="127.0.0.1", port=host.port)
    ranks = Ranks(ward, ward.models / TINY, 2, variables=mistake)
    pid = ranks.pid("rank-1")
    until(lambda: _is_connecting(pid), "a connection that is not answered", every_s=0.05)
    time.sleep(ward.random.uniform(0.0, 1.0))
    return ranks.patient()


def _port_taken(ward: Ward) -> Patient:
    """Another server has the port; the engine is up, and nobody can reach it."""
    port = free_port()
    ward.python("-m", "http.server", str(port), "--bind", "127.0.0.1", stderr=-3, stdout=-3)
    until(lambda: _listens(port), "the other server")
    server = Foreign(ward, "vllm", ward.models / TINY, 1, port=port)
    until(lambda: "Address already in use" in server.said(), "the failure", every_s=0.05)
    return server.patient()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _proxy(ward: Ward) -> Patient:
    """The warm-up request of the server itself goes to a proxy: one that is silent, or one that refuses."""
    proxy = ward.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    is_silent = ward.random.random() < 0.5
    if not is_silent:
        threading.Thread(target=_refuse, args=(proxy,), daemon=True).start()
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    variables = {ward.random.choice(["http_proxy", "HTTP_PROXY"]): address}
    style = ward.random.choice(["sglang", "vllm"])
    server = Foreign(ward, style, ward.models / TINY, 1, variables=variables)
    until(lambda: _listens(server.port), "its port", every_s=0.05)
    time.sleep(1.0)
    return server.patient("silent" if is_silent else "403")


def _refuse(proxy: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = proxy.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            connection.close()


def _lost_request(ward: Ward) -> Patient:
    """The engine forgets requests; /health stays green."""
    number = ward.random.randrange(3, 12)
    mistake = change("rank 0", "firstlight.engine.core", "lose_requests", number=number)
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, variables=mistake).ready()

    def ask() -> None:
        with contextlib.suppress(Exception):
            server.ask(timeout_s=120)

    for _ in range(number + 1):
        client = threading.Thread(target=ask, daemon=True)
        client.start()
        client.join(2.0)
        if client.is_alive():
            break
    return server.patient(f"request {number}")


def _other_user(ward: Ward) -> Patient:
    """A rank runs as another user than the server and the doctor, and the others wait for it."""
    need_root("a rank of another user")
    order = {"users": [NOBODY, NOBODY - 1], "user": NOBODY, "fault": "absent", "rank": 1}
    model = uncached_copy(ward, ward.models / TINY)
    for file in model.iterdir():
        file.chmod(0o644)
    server = Foreign(ward, "vllm", model, 2, order)
    until_still(*(server.titled(f"VLLM::Worker_TP{rank}") for rank in range(2)))
    return server.patient(as_uid=NOBODY)


def _has_syn(case: Case) -> bool:
    sockets = case.of(Sockets, "run")
    return sockets is not None and any(end.state == "SYN_SENT" for end in sockets.sockets)


KINDS = (
    Kind(
        name="hub-unreachable",
        is_quick=True,
        what="a model of the hub is asked for, and the hub does not answer",
        start=_hub,
        causes=frozenset({"hub-download"}),
        conditions=_STUCK,
        holds=_has_syn,
    ),
    Kind(
        name="rendezvous-unreachable",
        what="the address where ranks meet drops all packets",
        start=_no_store,
        causes=frozenset({"bootstrap-network"}),
        conditions=_STUCK,
        holds=_has_syn,
    ),
    Kind(
        name="port-taken",
        is_quick=True,
        what="another server listens on the port of a foreign server, whose engine is up",
        start=_port_taken,
        causes=frozenset({"port-taken"}),
        conditions=_STUCK,
    ),
    Kind(
        name="proxy-catches-warm-up",
        is_quick=True,
        what="a proxy variable sends a server's warm-up request elsewhere",
        start=_proxy,
        causes=frozenset({"proxy-in-the-way"}),
        conditions=_STUCK,
    ),
    Kind(
        name="request-lost",
        what="a request never ends while /health is green",
        start=_lost_request,
        causes=frozenset({"green-not-serving"}),
        conditions=_STUCK,
        settle_s=2.0,
    ),
    Kind(
        name="other-users-rank",
        what="the rank that all wait for belongs to another user than the doctor",
        start=_other_user,
        causes=frozenset({"hidden-process"}),
        conditions=frozenset({"unclear", "stuck"}),
        why="the server stands still, and why cannot be seen: both words are honest",
        subject="rank-1",
    ),
)
