"""The machine as a whole: memory, pressure, kills, and room in the file systems that servers need.

Invariant: what a kernel does not tell is None.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_host import FreeSpace, HostMemory, Pressure, Stall
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.procfs import kib_bytes


def collect_memory(scene: Scene) -> Iterator[Observation]:
    """Memory of the host with the counters of its use."""
    pairs = (line.partition(":") for line in scene.procfs.text("meminfo").splitlines())
    memory = {name: kib_bytes(value) for name, _, value in pairs}
    counters: dict[str, int] = {}
    with contextlib.suppress(OSError):
        rows = (line.split() for line in scene.procfs.text("vmstat").splitlines())
        counters = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    value = HostMemory(
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        page_cache_bytes=memory.get("Cached", 0),
        shared_bytes=memory.get("Shmem", 0),
        oom_kills=counters.get("oom_kill"),
        file_refaults=counters.get("workingset_refault_file"),
        major_faults=counters.get("pgmajfault"),
    )
    yield Observation(subject=HOST, source=str(scene.procfs.path("meminfo")), value=value)


def collect_pressure(scene: Scene) -> Iterator[Observation]:
    """How much time tasks lose waiting for the processor, for I/O and for memory."""
    stalls: dict[str, Stall | None] = {
        name: parse_pressure(scene.procfs.text("pressure", name)) for name in ("cpu", "io", "memory")
    }
    source = str(scene.procfs.path("pressure"))
    yield Observation(subject=HOST, source=source, value=Pressure(scope="host", **stalls))


def parse_pressure(text: str) -> Stall | None:
    """The two lines of a pressure file; the processor's may lack the second."""
    rows = {
        words[0]: dict(word.split("=", 1) for word in words[1:] if "=" in word)
        for line in text.splitlines()
        if (words := line.split())
    }
    some, full = rows.get("some"), rows.get("full", {})
    if some is None:
        return None
    return Stall(
        some_percent=float(some.get("avg10", 0)),
        full_percent=float(full.get("avg10", 0)),
        some_total_us=int(some.get("total", 0)),
        full_total_us=int(full.get("total", 0)),
    )


def collect_space(scene: Scene) -> Iterator[Observation]:
    """Room in shared memory, in the run directory and in the temporary folder."""
    places = {"shm": "/dev/shm", "tmp": "/tmp"}
    if scene.target.run_dir is not None:
        places["run directory"] = scene.target.run_dir
    for purpose, path in places.items():
        with contextlib.suppress(OSError):  # not every system has both
            yield Observation(subject=HOST, source=f"statvfs {path}", value=_space(scene, purpose, path))


def _space(scene: Scene, purpose: str, path: str) -> FreeSpace:
    """As the server sees it: in a container its /dev/shm is another one than ours."""
    found = None
    for process in scene.target.ranks or scene.target.processes:
        with contextlib.suppress(OSError):
            found = os.statvfs(f"{scene.procfs.path(process.pid, 'root')}{path}")
            break
    found = found or os.statvfs(path)
    return FreeSpace(
        purpose=purpose,
        path=path,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        free_inodes=found.f_favail,
    )


HOST_MEMORY = Collector("host-memory", collect_memory)
PRESSURE = Collector("pressure", collect_pressure)
SPACE = Collector("free-space", collect_space, deadline_s=3.0, is_dynamic=False)
