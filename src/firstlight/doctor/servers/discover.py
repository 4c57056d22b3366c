"""Finding the servers on this machine, or the one that a pid, an address or a run directory points to.

Reads /proc only, never asks a process anything. Invariant: a process belongs to a target by descent, by the
session that the target opened, or by the run it carries; never by its looks alone.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from firstlight.base.config import CONFIG_FILE
from firstlight.base.errors import UsageError
from firstlight.doctor.case.target import Engine, Target
from firstlight.doctor.servers.assemble import assemble
from firstlight.doctor.servers.census import Census
from firstlight.doctor.servers.network import listeners
from firstlight.doctor.servers.options import reachable
from firstlight.doctor.servers.procfs import ProcFs

_RUN_FILES = (CONFIG_FILE, "run.json", "boxes")
RUN_VARIABLE = "FIRSTLIGHT_RUN_ID"


def find_targets(procfs: ProcFs | None = None) -> tuple[Target, ...]:
    """Every model server on this machine, the oldest first."""
    census = Census(procfs or ProcFs())
    groups: dict[int, set[int]] = {}
    for pid in census.stats:
        if census.serves(pid):
            root = census.root(pid)
            groups.setdefault(_group(census, root), set()).add(root)
    targets = [assemble(census, census.members(roots)) for roots in groups.values()]
    return tuple(sorted(targets, key=lambda target: target.started_wall_s))


def target_of_pid(pid: int, procfs: ProcFs | None = None) -> Target:
    """The whole server of a process. Raises `UsageError` when there is none of that number, or it serves
    nothing."""
    census = Census(procfs or ProcFs())
    if pid not in census.stats:
        raise UsageError(f"there is no process {pid}.", "Look for its number with `firstlight ps` or `ps`.")
    _require_a_server(census, pid, census.root(pid))
    return _whole(census, pid)


def target_below(pid: int, run_id: str, procfs: ProcFs | None = None) -> Target:
    """What a process has started, with the orphans that carry its run, for who started it himself.

    Unlike the others it never looks upwards: a launcher above it is no part of it, whatever its words are.
    """
    census = Census(procfs or ProcFs())
    adopters = (0, 1, *([census.stats[pid].parent] if pid in census.stats else []))
    orphans = {
        other
        for other, stat in census.stats.items()
        if stat.parent in adopters and _run_of(census.procfs, other) == run_id
    }
    return assemble(census, census.members({pid, *orphans}))


def _whole(census: Census, pid: int) -> Target:
    root = census.root(pid)
    roots = {root}
    if census.serves(root):
        roots |= {
            other
            for other in map(census.root, filter(census.serves, census.stats))
            if _joins(census, other, root)
        }
    return assemble(census, census.members(roots))


def target_of_url(url: str, procfs: ProcFs | None = None) -> Target:
    """The server that listens where the address points to. Without a listener, a target of no process."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname or parts.scheme not in ("", "http", "https"):
        raise UsageError(f"{url!r} is no address.", "Write it as http://127.0.0.1:8000.")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = reachable(parts.hostname)
    seam = procfs or ProcFs()
    pids = listeners(seam, port)
    if not pids:
        note = f"no process that we can see listens on port {port}"
        return Target(engine=Engine.UNKNOWN, processes=(), addresses=((host, port),), notes=(note,))
    return _whole(Census(seam), pids[0])  # whatever it is: it listens where it was pointed to


def target_of_run(run_dir: str | Path, procfs: ProcFs | None = None) -> Target:
    """The run of a directory, be it alive or dead. Raises `UsageError` when there is none.

    Our own processes name it in their arguments, those of a foreign engine carry it in their environment.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no run directory.", "List the runs with `firstlight ps`.")
    if not any((folder / name).exists() for name in _RUN_FILES):
        raise UsageError(f"{folder} is no run directory.", "List the runs with `firstlight ps --all`.")
    census = Census(procfs or ProcFs())
    name = str(folder)
    roots = {
        census.root(pid)
        for pid, command in census.commands.items()
        if census.serves(pid) and (name in command or _run_of(census.procfs, pid) == folder.name)
    }
    return assemble(census, census.members(roots), run_dir=name)


def _require_a_server(census: Census, pid: int, root: int) -> None:
    below = census.members({root})
    name = census.stats[pid].comm
    if not any(_may_serve(census, one) for one in below):
        raise UsageError(
            f"process {pid} ({name}) belongs to no model server.",
            "Point at a process of one, or at its address with --url.",
        )
    servers = {census.root(one) for one in below if census.serves(one)}
    if root == 1 or len(servers) > 1:
        raise UsageError(
            f"process {pid} ({name}) is above {len(servers)} servers.", "Point at a process of one of them."
        )


def _may_serve(census: Census, pid: int) -> bool:
    """Whether it may be one that we do not know: a part of a server, or a rank of somebody's own program."""
    if census.serves(pid) or census.stats[pid].state in "ZX":
        return True
    try:
        return bool(census.procfs.environ(pid).keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE"})
    except OSError:
        return True  # of another user: who points at it knows why


def _group(census: Census, root: int) -> int:
    """Orphans of one session are one server; anything else is its own."""
    stat = census.stats[root]
    return -stat.session if stat.parent <= 1 and stat.session != root else root


def _joins(census: Census, other: int, root: int) -> bool:
    """Whether an orphan belongs to the same server: it opened no session of its own, or carries the run."""
    if other == root or census.stats[other].parent > 1:
        return False
    if census.stats[other].session == census.stats[root].session:
        return True
    run = _run_of(census.procfs, root)
    return run is not None and run == _run_of(census.procfs, other)


def _run_of(procfs: ProcFs, pid: int) -> str | None:
    try:
        return procfs.environ(pid).get(RUN_VARIABLE)
    except OSError:
        return None
