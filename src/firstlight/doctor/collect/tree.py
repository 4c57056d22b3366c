"""The process tree of the target at one moment, and the compilers that work below it.

Invariant: a member that is gone stays in the list, with an empty state.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN, Role
from firstlight.doctor.case.values_host import Compiler, Compilers, Member, Tree
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.identity import is_compiler
from firstlight.doctor.servers.procfs import Stat


def collect_tree(scene: Scene) -> Iterator[Observation]:
    """The members found at first, then who was born below them since."""
    source = f"{scene.procfs.root}/*/stat"
    stats, below = descendants(scene)
    members = []
    for process in scene.target.processes:
        stat = stats.get(process.pid)
        is_there = stat is not None and stat.start_ticks == process.start_ticks
        members.append(
            Member(
                key=process.key,
                pid=process.pid,
                parent=stat.parent if is_there and stat else process.parent,
                state=stat.state if is_there and stat else "",
                is_rank=process.role is Role.RANK,
            )
        )
    known = {process.pid for process in scene.target.processes}
    newcomers = tuple(
        Member(key=f"pid-{pid}", pid=pid, parent=stats[pid].parent, state=stats[pid].state)
        for pid in below
        if pid not in known
    )
    yield Observation(subject=RUN, source=source, value=Tree(members=tuple(members), newcomers=newcomers))


def collect_compilers(scene: Scene) -> Iterator[Observation]:
    """Living compilers with their processor time; that there is none is a finding too."""
    stats, below = descendants(scene)
    running = tuple(
        Compiler(pid=pid, name=stat.comm, cpu_s=stat.cpu_s, parent=_builder(scene, stats, pid))
        for pid in below
        if is_compiler((stat := stats[pid]).comm) and stat.state not in "ZX"
    )
    yield Observation(subject=RUN, source=f"{scene.procfs.root}/*/stat", value=Compilers(running=running))


def _builder(scene: Scene, stats: dict[int, Stat], pid: int) -> str:
    """The process of the target for which a compiler works: the nearest above it that is none itself."""
    while (stat := stats.get(pid)) is not None and is_compiler(stat.comm) and stat.parent != pid:
        pid = stat.parent
    workers = {one.pid for one in scene.target.processes if one.role not in (Role.HELPER, Role.COMPILER)}
    while pid not in workers and pid in stats and stats[pid].parent > 1:
        pid = stats[pid].parent  # a shell between them
    return scene.target.key_of(pid)


def descendants(scene: Scene) -> tuple[dict[int, Stat], list[int]]:
    """All processes by pid, and the pids at or below the target's living ones."""
    stats = {pid: stat for pid in scene.procfs.pids() if (stat := scene.procfs.stat(pid)) is not None}
    found = {
        process.pid
        for process in scene.target.processes
        if process.pid in stats and stats[process.pid].start_ticks == process.start_ticks
    }
    while more := {pid for pid, stat in stats.items() if pid not in found and stat.parent in found}:
        found |= more
    return stats, sorted(found)


TREE = Collector("tree", collect_tree)
COMPILERS = Collector("compilers", collect_compilers)
