"""The control group of each process, version 1 or 2: memory, kills for want of it, threads, pressure.

Inside a container the path in /proc/P/cgroup may be that of the host, so the mount itself is tried too.
Invariant: of nested groups the limit is that of the tightest, and the kills are those counted nearest to the
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_host import CgroupMemory, CgroupPids, Pressure, Stall
from firstlight.doctor.collect.host import parse_pressure
from firstlight.doctor.collect.scene import Collector, Scene, failed

_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


def collect_cgroups(scene: Scene) -> Iterator[Observation]:
    """Memory, pids and pressure of each process's group; processes of one group share what was read."""
    known: dict[str, list[tuple[str, Value]]] = {}
    for process in scene.target.processes:
        source = str(scene.procfs.path(process.pid, "cgroup"))
        if not scene.procfs.is_same(process.pid, process.start_ticks):
            continue  # a zombie is moved to the root group, which says nothing of it
        try:
            text = scene.procfs.text(process.pid, "cgroup")
        except OSError as error:
            yield Observation(subject=process.key, source=source, value=failed("cgroup", error))
            continue
        if text not in known:
            known[text] = [*_memory(scene.cgroups, text), *_pids(scene.cgroups, text)]
            known[text] += _pressure(scene.cgroups, text)
        for path, value in known[text]:
            yield Observation(subject=process.key, source=path, value=value)


def folders(root: Path, text: str, controller: str) -> list[tuple[Path, int]]:
    """The folders of a group and its ancestors with their version, the nearest first, where they exist."""
    found: list[tuple[Path, int]] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        names = dict.fromkeys((controller, controllers)) if controllers else ("", "unified")
        parts = [part for part in group.split("/") if part and part != ".."]
        candidates = [
            (root / name).joinpath(*parts[:depth]) for name in names for depth in range(len(parts), -1, -1)
        ]
        found += [(folder, version) for folder in candidates if folder.is_dir()]
    return found


def _memory(root: Path, text: str) -> Iterator[tuple[str, Value]]:
    read = [_memory_of(folder, version) for folder, version in folders(root, text, "memory")]
    told = [memory for memory in read if memory.current_bytes is not None]
    if not told:
        return
    limited = [memory for memory in told if memory.max_bytes is not None]
    tightest = min(limited, key=_left_bytes, default=told[0])
    kills = next((memory for memory in told if memory.oom_kills is not None), tightest)
    value = CgroupMemory(
        path=tightest.path,
        version=tightest.version,
        current_bytes=tightest.current_bytes,
        max_bytes=tightest.max_bytes,
        oom_kills=kills.oom_kills,
        failures=tightest.failures,
        is_under_oom=tightest.is_under_oom,
        file_refaults=tightest.file_refaults,
        cache_bytes=tightest.cache_bytes,
    )
    yield tightest.path, value


def _left_bytes(memory: CgroupMemory) -> int:
    return (memory.max_bytes or 0) - (memory.current_bytes or 0)


def _memory_of(folder: Path, version: int) -> CgroupMemory:
    statistics = _pairs(folder / "memory.stat")
    cache = statistics.get("file" if version == 2 else "total_cache")
    if version == 2:
        events = _pairs(folder / "memory.events")
        return CgroupMemory(
            path=str(folder),
            version=2,
            current_bytes=_number(folder / "memory.current"),
            max_bytes=_number(folder / "memory.max"),
            oom_kills=events.get("oom_kill"),
            failures=events.get("max"),
            file_refaults=statistics.get("workingset_refault_file"),
            cache_bytes=cache,
        )
    control = _pairs(folder / "memory.oom_control")
    limit = _number(folder / "memory.limit_in_bytes")
    return CgroupMemory(
        path=str(folder),
        version=1,
        current_bytes=_number(folder / "memory.usage_in_bytes"),
        max_bytes=None if limit is None or limit >= _UNLIMITED_BYTES else limit,
        oom_kills=control.get("oom_kill"),
        failures=_number(folder / "memory.failcnt"),
        is_under_oom=bool(control["under_oom"]) if "under_oom" in control else None,
        file_refaults=statistics.get(
            "total_workingset_refault_file", statistics.get("workingset_refault_file")
        ),
        cache_bytes=cache,
    )


def _pids(root: Path, text: str) -> Iterator[tuple[str, Value]]:
    read = [
        CgroupPids(
            path=str(folder),
            current=_number(folder / "pids.current"),
            max_pids=_number(folder / "pids.max"),
            denied=_pairs(folder / "pids.events").get("max"),
        )
        for folder, _ in folders(root, text, "pids")
    ]
    told = [pids for pids in read if pids.current is not None]
    limited = [pids for pids in told if pids.max_pids is not None]
    tightest = min(limited, key=lambda pids: (pids.max_pids or 0) - (pids.current or 0), default=None)
    for pids in [tightest] if tightest else told[:1]:
        yield pids.path, pids


def _pressure(root: Path, text: str) -> Iterator[tuple[str, Value]]:
    for folder, version in folders(root, text, "memory"):
        stalls: dict[str, Stall | None] = {
            name: parse_pressure(_text(folder / f"{name}.pressure")) for name in ("cpu", "io", "memory")
        }
        if version == 2 and any(stalls.values()):
            yield str(folder), Pressure(scope=str(folder), **stalls)
            return


def _pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """A number; None for "max", -1 and a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


CGROUPS = Collector("cgroup", collect_cgroups)
