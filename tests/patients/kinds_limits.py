"""Patients that hit a limit: shared memory, open files, threads, or a port that lets nobody in.

Listed by `kinds`. Invariant: the limit is the system's, and the call that fails is the engine's own.
"""

from __future__ import annotations

import os
import resource

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_process import Limits
from patients.foreign_servers import Foreign
from patients.kinds_dead import is_zombie
from patients.models import TINY
from patients.native import SLOW_TO_JUDGE, Load, Server, change
from patients.patient import Kind, Patient, Ward, need_root, until, until_still
from patients.places import few_tasks, small_shared_memory

_DEAD_OR_STUCK = frozenset({"dead", "stuck"})
_LIMIT = frozenset({"process-limit"})


def _small_shared_memory(ward: Ward) -> Patient:
    """A container's /dev/shm of some megabytes; a rank dies at it, and its parent waits."""
    need_root("a /dev/shm of one's own")
    size_bytes = ward.random.randrange(1, 8) * 2**20
    order = {"shared_bytes": 16 * 2**20}
    prepare = small_shared_memory(size_bytes)
    server = Foreign(ward, "sglang", ward.models / TINY, 2, order, preexec_fn=prepare)
    pids = [server.titled(f"sglang::scheduler_TP{rank}") for rank in range(2)]
    until(lambda: all(is_zombie(pid) for pid in pids), "the end of the ranks", every_s=0.05)
    return server.patient(f"{size_bytes >> 20} MiB")


def _files_in_the_api(ward: Ward) -> Patient:
    """More clients than the api process may have open files: it accepts no more."""
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE).ready()
    pid = server.pid("api")
    now = len(os.listdir(f"/proc/{pid}/fd"))
    limit = now + ward.random.randrange(2, 20)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    import socket

    for _ in range(limit):  # clients that keep their connections, as pools do
        ward.stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= limit - 1, "the limit")
    return server.patient(f"{limit} files")


def _files_in_a_rank(ward: Ward) -> Patient:
    """A rank leaks sockets until it may open no more."""
    mistake = change("rank 0", "firstlight.engine.core", "many_files", number=ward.random.randrange(60, 160))
    server = Server(ward, ward.models / TINY, variables=mistake).ready()
    pid = server.pid("rank-0")
    limit = ward.random.randrange(100, 400)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    Load(ward, server)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the rank", every_s=0.02)
    return server.patient(f"{limit} files", subject="rank-0")


def _few_threads(ward: Ward) -> Patient:
    """A group for tasks that is too small for a foreign server; a rank fails, and its parent waits."""
    group = few_tasks(ward, ward.random.randrange(5, 8))
    server = Foreign(ward, "sglang", ward.models / TINY, 2, {}, preexec_fn=group.enter)
    until_still(*(server.titled(f"sglang::scheduler_TP{rank}") for rank in range(2)))
    return server.patient()


def _at_its_limit(case: Case) -> bool:
    limits = case.of(Limits, "api")
    return limits is not None and (limits.num_open_files or 0) >= (limits.max_open_files or 0) - 1


KINDS = (
    Kind(
        name="shared-memory-too-small",
        what="a foreign server's ranks need more /dev/shm than its container has",
        start=_small_shared_memory,
        causes=frozenset({"shm-too-small"}),
        conditions=_DEAD_OR_STUCK,
        why="the ranks are dead and the launcher waits for them: both words are true",
    ),
    Kind(
        name="api-out-of-files",
        what="clients hold so many connections that the api process can accept no more",
        start=_files_in_the_api,
        causes=_LIMIT,
        conditions=frozenset({"stuck"}),
        subject="api",
        holds=_at_its_limit,
    ),
    Kind(
        name="rank-out-of-files",
        what="a rank leaks sockets up to its limit and ends",
        start=_files_in_a_rank,
        causes=_LIMIT,
        conditions=frozenset({"dead"}),
    ),
    Kind(
        name="too-few-threads",
        what="a group for tasks is too small for a foreign server",
        start=_few_threads,
        causes=_LIMIT,
        conditions=_DEAD_OR_STUCK,
        why="the rank is dead and the launcher waits for it: both words are true",
    ),
)
