"""From a set of pids to a `Target`: roles, ranks, names, and what the command line promises.

Invariant: keys are unique; a rank is named only where the process or its environment names it, so a zombie
without a title is a rank of unknown number.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.config import CONFIG_FILE
from firstlight.doctor.case.redact import hide_in_command
from firstlight.doctor.case.target import Engine, Role, Target, TargetProcess
from firstlight.doctor.servers.census import Census
from firstlight.doctor.servers.identity import Identity, is_helper, is_spawned, option
from firstlight.doctor.servers.options import Sizes, address_of, model_of, reachable, sizes

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_RECORD = "/run.json"
_FIRST = (Role.SUPERVISOR, Role.LAUNCHER, Role.API, Role.ENGINE, Role.RANK)


def assemble(census: Census, pids: Iterable[int], run_dir: str | None = None) -> Target:
    """The target of these processes, the launching ones first, then by rank."""
    members = sorted(pid for pid in pids if pid in census.stats)
    engine = _engine(census, members) if members or run_dir is None else Engine.NATIVE
    command = _main_command(census, members)
    groups = sizes(engine, command)
    run_dir = run_dir or _run_dir(census, members)
    config = _config(run_dir)
    found = [_process(census, pid, engine, groups) for pid in members]
    expected, expected_from = _expected(engine, groups, config, found)
    processes = _with_keys(_single_rank(found, expected))
    return Target(
        engine=engine,
        processes=processes,
        expected_ranks=expected,
        expected_from=expected_from,
        model=_text(config, "model", "path") or model_of(engine, command),
        run_dir=run_dir,
        addresses=_addresses(engine, command, config),
        started_wall_s=min((census.procfs.start_wall_s(p.start_ticks) for p in processes), default=0.0),
    )


def _engine(census: Census, members: list[int]) -> Engine:
    known = [identity.engine for pid in members if (identity := census.identities.get(pid))]
    counted = Counter(engine for engine in known if engine is not Engine.UNKNOWN)
    return counted.most_common(1)[0][0] if counted else Engine.UNKNOWN


def _main_command(census: Census, members: list[int]) -> tuple[str, ...]:
    """The arguments that a person typed: those of the process that launches, or of any that has some."""
    ranked = sorted(members, key=lambda pid: (_place(census.identities.get(pid)), pid))
    return next((census.commands[pid] for pid in ranked if len(census.commands[pid]) > 1), ())


def _place(identity: Identity | None) -> int:
    return _FIRST.index(identity.role) if identity and identity.role in _FIRST else len(_FIRST)


def _process(census: Census, pid: int, engine: Engine, groups: Sizes) -> TargetProcess:
    stat, command = census.stats[pid], census.commands[pid]
    identity = census.identities.get(pid)
    role = identity.role if identity else _role_by_place(census, pid, engine)
    rank = groups.rank_of(identity.labels) if identity and role is Role.RANK else None
    if rank is None and role in (Role.RANK, Role.HELPER) and not is_helper(command):
        rank = _rank_in_environment(census, pid)
        role = Role.RANK if rank is not None else role
    return TargetProcess(
        key="",
        pid=pid,
        start_ticks=stat.start_ticks,
        parent=stat.parent,
        session=stat.session,
        role=role,
        rank=rank,
        uid=_uid(census, pid),
        comm=stat.comm,
        command=hide_in_command(command),
    )


def _role_by_place(census: Census, pid: int, engine: Engine) -> Role:
    """A child that has no title yet: what it will be is told by who started it."""
    parent = census.identities.get(census.stats[pid].parent)
    if parent is None or not is_spawned(census.commands[pid]) or engine is Engine.UNKNOWN:
        return Role.HELPER
    if parent.role in (Role.API, Role.LAUNCHER):
        return Role.ENGINE
    return Role.RANK if parent.role is Role.ENGINE else Role.HELPER


def _rank_in_environment(census: Census, pid: int) -> int | None:
    with contextlib.suppress(OSError):
        variables = census.procfs.environ(pid)
        parent = census.stats[pid].parent
        above = census.procfs.environ(parent) if parent in census.stats else {}
        for name in _RANK_VARIABLES:
            value = variables.get(name, "")
            if value.isdigit() and above.get(name) != value:  # inherited: it is the parent's rank
                return int(value)
    return None


def _uid(census: Census, pid: int) -> int | None:
    try:
        return int(census.procfs.status(pid)["Uid"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _single_rank(found: list[TargetProcess], expected: int | None) -> list[TargetProcess]:
    """With one rank, vLLM's engine core holds the model itself, or a worker that does not say its number."""
    ranks = [process for process in found if process.role is Role.RANK]
    if expected == 1 and len(ranks) == 1 and ranks[0].rank is None:
        return [msgspec.structs.replace(p, rank=0) if p is ranks[0] else p for p in found]
    cores = [process for process in found if process.role is Role.ENGINE]
    if expected != 1 or len(cores) != 1 or any(process.role is Role.RANK for process in found):
        return found
    rank = msgspec.structs.replace(cores[0], role=Role.RANK, rank=0)
    return [rank if process is cores[0] else process for process in found]


def _expected(
    engine: Engine, groups: Sizes, config: dict[str, Any], found: list[TargetProcess]
) -> tuple[int | None, str]:
    configured = _section(config, "engine").get("tensor_parallel")
    if isinstance(configured, int) and configured > 0:
        return configured, f"{CONFIG_FILE} of the run"
    has_launcher = any(process.role in (Role.SUPERVISOR, Role.API, Role.LAUNCHER) for process in found)
    if engine is Engine.UNKNOWN or not has_launcher:
        return None, "nothing says how many ranks there should be"
    return groups.ranks_here, f"command line: {groups.said}"


def _with_keys(found: list[TargetProcess]) -> tuple[TargetProcess, ...]:
    names = [_name(process) for process in found]
    counted = Counter(names)
    keyed = [
        msgspec.structs.replace(process, key=name if counted[name] == 1 else f"{name}-{process.pid}")
        for process, name in zip(found, names, strict=True)
    ]
    order = list(Role)
    return tuple(
        sorted(keyed, key=lambda p: (order.index(p.role), p.rank if p.rank is not None else 1 << 30, p.pid))
    )


def _name(process: TargetProcess) -> str:
    if process.role is Role.RANK:
        return f"rank-{process.rank}" if process.rank is not None else f"rank-unknown-{process.pid}"
    if process.role in (Role.HELPER, Role.COMPILER):
        return f"{process.role.value}-{process.pid}"
    return str(process.role.value)


def _run_dir(census: Census, members: list[int]) -> str | None:
    commands = (census.commands[pid] for pid in members if census.identities.get(pid))
    said = next((folder for command in commands if (folder := option(command, ("--run-dir",)))), None)
    return said or next((folder for pid in members if (folder := _folder_of_record(census, pid))), None)


def _folder_of_record(census: Census, pid: int) -> str | None:
    """A supervisor whose children are gone still has the record of its run open."""
    identity = census.identities.get(pid)
    if identity is None or identity.role is not Role.SUPERVISOR:
        return None
    with contextlib.suppress(OSError):
        for link in census.procfs.path(pid, "fd").iterdir():
            target = _target_of(link)
            if target.endswith(_RECORD):
                return target.removesuffix(_RECORD)
    return None


def _target_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _config(run_dir: str | None) -> dict[str, Any]:
    """The resolved configuration of a native run, read leniently: it may be of another version."""
    if run_dir is None:
        return {}
    try:
        value = msgspec.json.decode((Path(run_dir) / CONFIG_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text(config: dict[str, Any], section: str, name: str) -> str | None:
    value = _section(config, section).get(name)
    return value if isinstance(value, str) else None


def _addresses(
    engine: Engine, command: tuple[str, ...], config: dict[str, Any]
) -> tuple[tuple[str, int], ...]:
    server = _section(config, "server")
    host, port = server.get("host"), server.get("port")
    if isinstance(host, str) and isinstance(port, int):
        return ((reachable(host), port),)
    address = address_of(engine, command) if command else None
    return (address,) if address else ()
