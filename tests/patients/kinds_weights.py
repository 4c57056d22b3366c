"""Patients whose weights are damaged, or come slowly.

Listed by `kinds`. Invariant: the files are on a real disk; the slow ones are read through the kernel's own
throttle, without a byte in the page cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_process import ProcessState
from patients.foreign_servers import Foreign
from patients.models import LARGE, SHARDED
from patients.native import SLOW_TO_JUDGE, Server
from patients.patient import Kind, Patient, Ward, until
from patients.places import slow_disk, uncached_copy

_DAMAGED = frozenset({"checkpoint-damaged"})
_DEAD_OR_STUCK = frozenset({"dead", "stuck"})
_ON_ITS_WAY = frozenset({"starting", "slow"})
_WHY = "the rank is dead and the launcher waits for it: both words are true"
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{0}\nsize {1}\n"


def _truncated(ward: Ward) -> Patient:
    """A download that ended early; a rank fails at it, and its parent waits."""

    def damage(shard: Path) -> None:
        os.truncate(shard, int(shard.stat().st_size * ward.random.uniform(0.2, 0.95)))

    return _damaged(ward, damage)


def _pointer(ward: Ward) -> Patient:
    """A clone without git-lfs."""

    def damage(shard: Path) -> None:
        shard.write_text(_POINTER.format("0" * 64, shard.stat().st_size))

    return _damaged(ward, damage)


def _damaged(ward: Ward, damage: Callable[[Path], None]) -> Patient:
    model = uncached_copy(ward, ward.models / SHARDED)
    shard = ward.random.choice(sorted(model.glob("*.safetensors")))
    damage(shard)
    style = ward.random.choice(["vllm", "sglang"])
    server = Foreign(ward, style, model, 1)
    until(lambda: "Error" in server.said(), "the failure", every_s=0.05)
    time.sleep(0.5)
    return server.patient(shard.name)


def _trickle(ward: Ward) -> Patient:
    """The rank reads from a slow disk, with positioned reads."""
    rate = ward.random.choice([0.5, 1, 2, 3, 4])
    group = slow_disk(ward, int(rate * 2**20))
    server = Server(ward, uncached_copy(ward, ward.models / SHARDED), *SLOW_TO_JUDGE).started()
    group.take(server.pid("rank-0"))
    server.until_phase("rank-0", "weights")
    time.sleep(ward.random.uniform(0.0, 3.0))
    return server.patient(f"{rate} MiB/s")


def _counted_before_read(ward: Ward) -> Patient:
    """The bar counts opened files and is at 100 %, while the bytes are faulted in page by page."""
    rate = ward.random.choice([0.5, 1, 2, 3])
    group = slow_disk(ward, int(rate * 2**20))
    style = ward.random.choice(["vllm", "sglang"])
    server = Foreign(ward, style, uncached_copy(ward, ward.models / SHARDED), 2)
    title = "VLLM::Worker_TP{}" if style == "vllm" else "sglang::scheduler_TP{}"
    for rank in range(2):
        group.take(server.titled(title.format(rank)))
    until(lambda: "100%" in server.said(), "the bar at 100 %", every_s=0.02)
    time.sleep(ward.random.uniform(0.5, 5.0))
    return server.patient(f"{style}, {rate} MiB/s")


def _large(ward: Ward) -> Patient:
    """A model that takes its time."""
    server = Server(ward, ward.models / LARGE).started()
    server.until_phase("rank-0", "build", "prepare", "weights")
    time.sleep(ward.random.uniform(0.0, 0.5))
    return server.patient()


def _faults_major(case: Case) -> bool:
    pairs = (case.pair(ProcessState, key) for key in case.subjects)
    return any(pair and pair.second.value.major_faults > pair.first.value.major_faults for pair in pairs)


KINDS = (
    Kind(
        name="shard-truncated",
        what="a shard of a foreign server's model is cut off",
        start=_truncated,
        causes=_DAMAGED,
        conditions=_DEAD_OR_STUCK,
        why=_WHY,
    ),
    Kind(
        name="shard-is-pointer",
        is_quick=True,
        what="a shard of a foreign server's model is a pointer of git-lfs",
        start=_pointer,
        causes=_DAMAGED,
        conditions=_DEAD_OR_STUCK,
        why=_WHY,
    ),
    Kind(
        name="weights-trickle",
        what="our rank loads from a slow disk: all is well",
        start=_trickle,
        causes=frozenset({"slow-weights"}),
        conditions=_ON_ITS_WAY,
    ),
    Kind(
        name="bar-at-100-percent",
        what="a foreign server's bar has counted opened files, and their bytes are still coming: all is well",
        start=_counted_before_read,
        causes=frozenset({"slow-weights"}),
        conditions=_ON_ITS_WAY,
        holds=_faults_major,
    ),
    Kind(
        name="large-model-starts",
        what="a larger model of ours is starting: all is well",
        start=_large,
        causes=frozenset({"on-its-way", "slow-weights", "processor-starved", "working", "idle"}),
        conditions=frozenset({"starting", "slow", "healthy"}),
        why="it may get ready while it is looked at; where its weights come slowly, that is so",
    ),
)
