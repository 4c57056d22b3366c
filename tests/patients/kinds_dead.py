"""Patients with a dead rank: killed, crashed, out of memory, noticed by nobody or by the supervisor.

Listed by `kinds`. Invariant: the rank really ends as said; who should have noticed still runs, or has ended
and left its records.
"""

from __future__ import annotations

import os
import resource
import signal
import time

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_process import ExitRecord, ProcessState
from patients.foreign_servers import Foreign
from patients.models import SHARDED, TINY
from patients.native import Load, Server
from patients.patient import Kind, Patient, Ward, until, until_still
from patients.places import little_memory

_DEAD = frozenset({"dead"})
_DIED = frozenset({"rank-died"})
GONE = frozenset({"rank-died", "rendezvous-missing"})
WHY_GONE = "a rank that ended without a trace and one that never was cannot be told apart from outside"


def _killed_and_reaped(ward: Ward) -> Patient:
    """The parent ignores SIGCHLD: the rank is gone without a trace while its pipe is read."""
    server = Foreign(ward, "sglang", ward.models / TINY, 3, {"ignores_children": True})
    rank = ward.random.randrange(3)
    pid = server.titled(f"sglang::scheduler_TP{rank}")
    time.sleep(ward.random.uniform(0.0, 1.0))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the rank")
    others = [server.titled(f"sglang::scheduler_TP{other}") for other in range(3) if other != rank]
    until_still(*others)  # until they wait for it, nothing is wrong with the server
    return server.patient(f"rank {rank}")


def _zombie(ward: Ward) -> Patient:
    """The parent reads a pipe whose writing end it holds itself, and never waits for its child."""
    server = Foreign(ward, "sglang", ward.models / TINY, 2)
    rank = ward.random.randrange(2)
    pid = server.titled(f"sglang::scheduler_TP{rank}")
    time.sleep(ward.random.uniform(0.0, 1.5))
    os.kill(pid, signal.SIGKILL)
    return server.patient(f"rank {rank}")


def _killed_core_waits(ward: Ward) -> Patient:
    """A worker of vLLM is killed while it answers; the engine core waits for its answer."""
    server = Foreign(ward, "vllm", ward.models / TINY, 1).ready()
    pid = server.titled("VLLM::Worker_TP0")
    time.sleep(ward.random.uniform(0.0, 0.5))
    os.kill(pid, signal.SIGKILL)
    Asker(ward, server)
    return server.patient()


class Asker:
    """A client in a thread that waits for its answer."""

    def __init__(self, ward: Ward, server: Foreign) -> None:
        import contextlib
        import threading

        def ask() -> None:
            with contextlib.suppress(Exception):
                server.ask(4, 120)

        threading.Thread(target=ask, daemon=True).start()


def _killed_serving(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY, "--tensor-parallel", "2").ready()
    Load(ward, server)
    rank = ward.random.randrange(2)
    time.sleep(ward.random.uniform(0.2, 1.0))
    os.kill(server.pid(f"rank-{rank}"), signal.SIGKILL)
    return server.patient(f"rank {rank}", subject=f"rank-{rank}")


def _killed_starting(ward: Ward) -> Patient:
    """The supervisor says so and ends; the doctor comes to what is left."""
    server = Server(ward, ward.models / SHARDED).started()
    pid = server.pid("rank-0")
    time.sleep(ward.random.uniform(0.0, 2.5))
    os.kill(pid, signal.SIGKILL)
    at_s = time.monotonic()
    server.process.wait(30)
    return server.patient(fault_s=at_s)


def _crashed(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY).ready()
    Load(ward, server)
    number = ward.random.choice([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL])
    time.sleep(ward.random.uniform(0.2, 1.0))
    os.kill(server.pid("rank-0"), number)
    return server.patient(number.name)


def _out_of_memory(ward: Ward) -> Patient:
    """The rank alone is in the small group."""
    limit_bytes = ward.random.randrange(60, 180) * 2**20
    group = little_memory(ward, limit_bytes)
    server = Server(ward, ward.models / SHARDED).started()
    group.take(server.pid("rank-0"))
    at_s = time.monotonic()
    server.process.wait(60)
    return server.patient(f"{limit_bytes >> 20} MiB", fault_s=at_s)


def _container_out_of_memory(ward: Ward) -> Patient:
    """The whole server is in the group, as in a container; its largest process is ended."""
    group = little_memory(ward, ward.random.randrange(260, 330) * 2**20)
    server = Foreign(ward, "sglang", ward.models / SHARDED, 2, {"grows": True}, preexec_fn=group.enter)
    pids = [server.titled(f"sglang::scheduler_TP{rank}") for rank in range(2)]
    until(lambda: any(is_zombie(pid) for pid in pids), "the kernel's kill")
    return server.patient()


def is_zombie(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def _address_limit(ward: Ward) -> Patient:
    """No more address space than the rank has after its imports and a little more."""
    server = Server(ward, ward.models / SHARDED).started()
    pid = server.pid("rank-0")
    server.until_phase("rank-0", "build", "prepare")  # its threads are there; weights and KV are not
    extra_bytes = ward.random.randrange(1, 40) * 2**20
    with open(f"/proc/{pid}/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (now_bytes + extra_bytes, now_bytes + extra_bytes))
    at_s = time.monotonic()
    server.process.wait(60)
    return server.patient(f"{extra_bytes >> 20} MiB more", fault_s=at_s)


def _has_zombie(case: Case) -> bool:
    return any(seen.value.is_zombie for seen in case.all(ProcessState))


def _ended_by(case: Case, *numbers: int) -> bool:
    return any(seen.value.signal in numbers for seen in case.all(ExitRecord))


KINDS = (
    Kind(
        name="killed-and-reaped",
        what="a rank gets SIGKILL while its parent reads from its pipe; nothing of it is left",
        start=_killed_and_reaped,
        causes=GONE,
        conditions=frozenset({"dead", "stuck"}),
        why=WHY_GONE,
    ),
    Kind(
        name="zombie-rank",
        is_quick=True,
        what="a rank gets SIGKILL, and its parent never asks",
        start=_zombie,
        causes=_DIED,
        conditions=_DEAD,
        holds=_has_zombie,
    ),
    Kind(
        name="worker-killed-serving",
        what="vLLM's only worker gets SIGKILL while the engine core waits for its answer; /health is green",
        start=_killed_core_waits,
        causes=_DIED,
        conditions=_DEAD,
        holds=_has_zombie,
    ),
    Kind(
        name="rank-killed-serving",
        what="a rank of ours gets SIGKILL under load; the supervisor lives",
        start=_killed_serving,
        causes=_DIED,
        conditions=_DEAD,
        holds=lambda case: _ended_by(case, signal.SIGKILL),
    ),
    Kind(
        name="rank-killed-starting",
        is_quick=True,
        what="a rank of ours gets SIGKILL in its start; only the run directory is left",
        start=_killed_starting,
        causes=_DIED,
        conditions=_DEAD,
        subject="rank-0",
        holds=lambda case: _ended_by(case, signal.SIGKILL),
    ),
    Kind(
        name="rank-crashed",
        what="native code of a rank crashes under load",
        start=_crashed,
        causes=_DIED,
        conditions=_DEAD,
        subject="rank-0",
    ),
    Kind(
        name="oom-killed",
        what="the kernel ends a rank of ours in a small memory group",
        start=_out_of_memory,
        causes=frozenset({"oom-killed"}),
        conditions=_DEAD,
        subject="rank-0",
        holds=lambda case: _ended_by(case, signal.SIGKILL),
    ),
    Kind(
        name="oom-killed-container",
        what="a foreign server's container is too small; the kernel ends one rank, and nobody notices",
        start=_container_out_of_memory,
        causes=frozenset({"oom-killed"}),
        conditions=_DEAD,
        holds=_has_zombie,
    ),
    Kind(
        name="memory-limit",
        what="an address limit lets a rank's allocation fail",
        start=_address_limit,
        causes=frozenset({"memory-limit"}),
        conditions=_DEAD,
        subject="rank-0",
    ),
)
