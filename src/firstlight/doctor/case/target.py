"""Who is examined: the processes of one model server, and what is known of it from outside.

Invariant: a process is its pid *and* its start; `key` is unique in a target and is what evidence, motions and
wait-for edges call it.
"""

from __future__ import annotations

import enum

import msgspec

HOST = "host"  # subjects of evidence that is about no single process
RUN = "run"


class Engine(enum.Enum):
    """Whose server it is."""

    NATIVE = "native"
    VLLM = "vllm"
    SGLANG = "sglang"
    UNKNOWN = "unknown"


class Role(enum.Enum):
    """What a process is for."""

    SUPERVISOR = "supervisor"
    JANITOR = "janitor"
    LAUNCHER = "launcher"  # the parent of a foreign engine that only waits
    API = "api"
    ENGINE = "engine"  # a scheduler without a model shard of its own (vLLM's EngineCore)
    RANK = "rank"
    DETOKENIZER = "detokenizer"
    COMPILER = "compiler"
    HELPER = "helper"  # resource trackers and whatever else belongs to the tree


class TargetProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `command` is free of secrets; a zombie has none. `uid` None: not told."""

    key: str
    pid: int
    start_ticks: int
    parent: int
    session: int
    role: Role
    rank: int | None = None
    uid: int | None = None
    comm: str = ""
    command: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One server. `expected_ranks` None: nothing says how many there should be."""

    engine: Engine
    processes: tuple[TargetProcess, ...]
    expected_ranks: int | None = None
    expected_from: str = ""
    model: str | None = None
    run_dir: str | None = None
    addresses: tuple[tuple[str, int], ...] = ()  # host and port it serves, or should serve
    started_wall_s: float = 0.0
    is_complete: bool = True  # False: the list of processes was cut or typed by somebody
    notes: tuple[str, ...] = ()

    def process(self, key: str) -> TargetProcess | None:
        """The process of this key."""
        return next((process for process in self.processes if process.key == key), None)

    def key_of(self, pid: int) -> str:
        """The key of a pid; one outside of the target is called "pid-N"."""
        return next((process.key for process in self.processes if process.pid == pid), f"pid-{pid}")

    @property
    def ranks(self) -> tuple[TargetProcess, ...]:
        """The processes that hold a part of the model."""
        return tuple(process for process in self.processes if process.role is Role.RANK)
