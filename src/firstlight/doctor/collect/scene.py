"""What a collector gets and what it is: the scene of an examination, and the contract of all collectors.

Invariant: a collector reads; it never traces with a stop or deletes anything, and signals nobody but,
`with_help`, who handles it by writing its stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import Target, TargetProcess
from firstlight.doctor.case.values import Failed, Value
from firstlight.doctor.servers.procfs import ProcFs


@dataclass(frozen=True)
class Options:
    """What a person allowed or asked for."""

    with_stacks: bool = True
    with_help: bool = False  # where stacks are refused: ask the supervisor, or signal who handles it
    with_generation: bool = False  # ask for one token through the real path
    generation_deadline_s: float = 10.0
    headers: tuple[tuple[str, str], ...] = ()  # for probes, such as an API key; never in evidence


@dataclass(frozen=True)
class Scene:
    """One target and the places to look at."""

    target: Target
    procfs: ProcFs = field(default_factory=ProcFs)
    cgroups: Path = Path("/sys/fs/cgroup")
    sysfs: Path = Path("/sys")
    devices: Path = Path("/dev")
    options: Options = Options()


@dataclass(frozen=True)
class Collector:
    """One kind of look. `collect` yields what it learns as it learns it; it may block or raise."""

    name: str
    collect: Callable[[Scene], Iterable[Observation]]
    deadline_s: float = 2.0
    is_dynamic: bool = True  # looked at twice


def each_process(
    scene: Scene, name: str, read: Callable[[ProcFs, TargetProcess], tuple[str, Value]]
) -> Iterator[Observation]:
    """One observation a living process; `read` gives source and value. What it may not see is evidence too.

    Nothing is told of a zombie: its files are empty or those of nobody.
    """
    for process in scene.target.processes:
        source = str(scene.procfs.path(process.pid))
        stat = scene.procfs.stat(process.pid)
        if stat is None or stat.start_ticks != process.start_ticks:
            gone = Failed(collector=name, reason="the process has ended", is_gone=True)
            yield Observation(subject=process.key, source=source, value=gone)
            continue
        if stat.state in "ZX":
            continue
        try:
            source, value = read(scene.procfs, process)
        except OSError as error:
            value = failed(name, error)
        yield Observation(subject=process.key, source=source, value=value)


def failed(name: str, error: Exception) -> Failed:
    """An exception as evidence."""
    return Failed(
        collector=name,
        reason=f"{type(error).__name__}: {error}"[:500],
        is_timeout=isinstance(error, TimeoutError),
        is_refused=isinstance(error, PermissionError),
        is_gone=isinstance(error, FileNotFoundError | ProcessLookupError),
    )
