"""Values of evidence about the machine, the run as a whole, or several processes at once.

See `values` for the union. Invariant: None and empty mean "not told", never zero.
"""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the tree at one moment. `state` empty: it is gone."""

    key: str
    pid: int
    parent: int
    state: str
    is_rank: bool = False


class Tree(msgspec.Struct, frozen=True, kw_only=True, tag="tree"):
    """All processes of the target. `newcomers` were not there when the target was found."""

    members: tuple[Member, ...]
    newcomers: tuple[Member, ...] = ()

    def with_state(self, letters: str) -> tuple[Member, ...]:
        """The members in one of these states, as "ZX" or "Tt"."""
        return tuple(member for member in self.members if member.state and member.state in letters)

    @property
    def gone(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if not member.state)


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True, tag="cgroup-memory"):
    """The memory of one control group, version 1 or 2. `oom_kills` and `failures` count since it was made."""

    path: str
    version: int
    current_bytes: int | None
    max_bytes: int | None  # None: no limit, or not told
    oom_kills: int | None = None
    failures: int | None = None  # v1: memory.failcnt; v2: `max` of memory.events
    is_under_oom: bool | None = None
    file_refaults: int | None = None
    cache_bytes: int | None = None


class CgroupPids(msgspec.Struct, frozen=True, kw_only=True, tag="cgroup-pids"):
    """The threads of one control group. `denied` counts forks that the limit refused."""

    path: str
    current: int | None
    max_pids: int | None
    denied: int | None = None


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Pressure stall information of one resource, in per cent of the last 10 s, and in all."""

    some_percent: float
    full_percent: float
    some_total_us: int
    full_total_us: int


class Pressure(msgspec.Struct, frozen=True, kw_only=True, tag="pressure"):
    """Time that tasks lost waiting. `scope`: "host" or a control group."""

    scope: str
    cpu: Stall | None = None
    io: Stall | None = None
    memory: Stall | None = None


class HostMemory(msgspec.Struct, frozen=True, kw_only=True, tag="host-memory"):
    """/proc/meminfo and the counters of /proc/vmstat that explain it."""

    total_bytes: int
    available_bytes: int
    page_cache_bytes: int
    shared_bytes: int
    oom_kills: int | None = None
    file_refaults: int | None = None
    major_faults: int | None = None


class SocketEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One socket. `peers` are the keys of processes at the other end, where it is on this machine."""

    protocol: str  # "tcp" or "unix"
    inode: int
    state: str  # "LISTEN", "SYN_SENT", "ESTABLISHED", ...
    local: str = ""
    remote: str = ""
    receive_bytes: int = 0
    send_bytes: int = 0
    owners: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    peer_inode: int = 0


class Sockets(msgspec.Struct, frozen=True, kw_only=True, tag="sockets"):
    """The sockets of the target's processes, and listeners on its ports whoever owns them."""

    sockets: tuple[SocketEnd, ...]
    has_unix_peers: bool = False  # whether the kernel was asked who is connected with whom


class PipeEnds(msgspec.Struct, frozen=True, kw_only=True):
    """A pipe that a process of the target holds, and every holder of either end."""

    inode: int
    readers: tuple[str, ...]
    writers: tuple[str, ...]


class Pipes(msgspec.Struct, frozen=True, kw_only=True, tag="pipes"):
    """All such pipes. `num_hidden`: processes of others whose descriptors we may not see."""

    pipes: tuple[PipeEnds, ...]
    num_hidden: int = 0


class FileLock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock on a file that concerns the target.

    `taker` took it; `holder` is who keeps it now: the taker, or one who inherited the descriptor from it.
    """

    kind: str  # "FLOCK", "POSIX", "OFDLCK"
    mode: str
    holder: str
    holder_pid: int
    taker_pid: int
    is_taker_alive: bool
    inode: int
    path: str = ""
    held_through: tuple[str, ...] = ()
    waiters: tuple[str, ...] = ()


class FileLocks(msgspec.Struct, frozen=True, kw_only=True, tag="file-locks"):
    """Such locks."""

    locks: tuple[FileLock, ...]


class LockFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose *existence* or flock guards a cache of compiled code or of downloads."""

    cache: str
    path: str
    age_s: float
    is_existence_lock: bool  # torch's FileBaton: nobody holds it, it is just there
    is_older_than_launch: bool | None
    is_older_than_boot: bool | None
    openers: tuple[str, ...] = ()
    flock_holders: tuple[str, ...] = ()


class JitLocks(msgspec.Struct, frozen=True, kw_only=True, tag="jit-locks"):
    """Lock files in the caches that the target's environment names."""

    locks: tuple[LockFile, ...]
    folders: tuple[str, ...]


class Compiler(msgspec.Struct, frozen=True, kw_only=True):
    """A living compiler. `parent`: the process of the target for which it works."""

    pid: int
    name: str
    cpu_s: float
    parent: str


class Compilers(msgspec.Struct, frozen=True, kw_only=True, tag="compilers"):
    """All of them; empty is a finding too."""

    running: tuple[Compiler, ...]


class FreeSpace(msgspec.Struct, frozen=True, kw_only=True, tag="free-space"):
    """One file system. `purpose`: "shm", "run directory", "tmp", "cache"."""

    purpose: str
    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None = None


class HttpProbe(msgspec.Struct, frozen=True, kw_only=True, tag="http"):
    """One request without any proxy. `outcome`: "answered", "refused", "silent" (accepted, said nothing),
    "unreachable", "reset"."""

    url: str
    address: str
    outcome: str
    status: int | None = None
    seconds: float = 0.0
    body: str = ""
    retry_after_s: float | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag="generation"):
    """One token asked for through the real path. `has_token`: it came."""

    url: str
    has_token: bool
    status: int | None
    seconds: float
    note: str = ""


class RequestLoad(msgspec.Struct, frozen=True, kw_only=True, tag="request-load"):
    """Requests that the server says it has, from its metrics. `tokens`: read and written since its start."""

    url: str
    running: int
    waiting: int
    tokens: int | None = None


class RasCount(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that launched equally many operations; `ranks` is empty where RAS only counts them."""

    operation: str  # "collective", "AllReduce", ...
    num_ranks: int
    launched: int
    ranks: tuple[int, ...] = ()


class RasCommunicator(msgspec.Struct, frozen=True, kw_only=True):
    """A communicator of which RAS reports something. `status`: "MISMATCH", "INCOMPLETE", ..."""

    name: str
    status: str
    counts: tuple[RasCount, ...] = ()
    missing_ranks: tuple[int, ...] = ()


class NcclRas(msgspec.Struct, frozen=True, kw_only=True, tag="nccl-ras"):
    """NCCL's own view across ranks. Operations in captured graphs are not counted."""

    address: str
    protocol: str
    communicators: tuple[RasCommunicator, ...]
    dead_pids: tuple[int, ...] = ()
    unreachable_pids: tuple[int, ...] = ()


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; a field that the driver does not tell is None."""

    index: int
    name: str
    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_mj: int | None = None
    process_bytes: dict[int, int | None] = {}
    compute_capability: tuple[int, int] | None = None
    bar1_total_bytes: int | None = None
    fabric: str = ""  # "unsupported", "not started", "in progress", "completed", or "failed (status N)"
    num_nvlinks: int | None = None
    p2p: dict[int, str] = {}  # by the other GPU's index: "ok", or why not


class Gpus(msgspec.Struct, frozen=True, kw_only=True, tag="gpus"):
    """All GPUs. None: there is no driver to ask; `note` says why."""

    gpus: tuple[Gpu, ...] | None
    driver: str = ""
    note: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver runs, as "12.8"


class FileProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with a checkpoint: "missing", "truncated", "lfs-pointer", "incomplete", "damaged"."""

    kind: str
    path: str
    detail: str


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """Whether a checkpoint's files are all there and whole, as far as headers tell."""

    path: str
    num_files: int
    total_bytes: int
    problems: tuple[FileProblem, ...]
