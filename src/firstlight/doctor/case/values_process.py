"""Values of evidence about one process: threads, memory, files, stacks, its black box and its log.

See `values` for the union. Invariant: None and empty mean "not told", never zero.
"""

from __future__ import annotations

import msgspec

from firstlight.base.blackbox.reader import Box


class ProcessState(msgspec.Struct, frozen=True, kw_only=True, tag="process"):
    """The process as a whole. `state` is the kernel's letter; empty when the process is gone."""

    state: str
    cpu_s: float = 0.0
    minor_faults: int = 0
    major_faults: int = 0
    num_threads: int = 0
    parent: int = 0
    tracer_pid: int = 0
    caught_signals: tuple[int, ...] | None = None
    namespace_pids: tuple[int, ...] = ()

    @property
    def is_gone(self) -> bool:
        return not self.state

    @property
    def is_zombie(self) -> bool:
        return self.state in ("Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


class ThreadState(msgspec.Struct, frozen=True, kw_only=True):
    """One thread. `wchan` empty: running, or hidden from us (then `Threads.is_hidden`)."""

    tid: int
    name: str
    state: str
    cpu_s: float
    major_faults: int
    wchan: str = ""
    syscall: str = ""  # "read", "running", or a number; empty: not told
    fd: int | None = None  # of a system call that waits on one descriptor
    queued_s: float = 0.0  # ready to run, and waiting for a processor


class Threads(msgspec.Struct, frozen=True, kw_only=True, tag="threads"):
    """All threads at one moment. `cpu_source`: "schedstat" (exact to the ns) or "stat" (to 10 ms)."""

    threads: tuple[ThreadState, ...]
    cpu_source: str
    is_hidden: bool = False  # wchan reads "0" for a process of another user
    num_left_out: int = 0


class InputOutput(msgspec.Struct, frozen=True, kw_only=True, tag="io"):
    """Of /proc/P/io. Reads through a mapping are in `read_bytes` only, network file systems in `rchar`."""

    rchar: int
    wchar: int
    read_bytes: int
    write_bytes: int


class StorageWait(msgspec.Struct, frozen=True, kw_only=True, tag="storage-wait"):
    """A thread in the kernel's hands for a file. `mark` changes whenever it is woken, or calls anew.

    `mount`: what and whose it is, in words. `answers`: whether the mount itself did when it was asked; None:
    it was not, being of a local disk.
    """

    tid: int
    mark: tuple[str, ...]
    path: str = ""
    mount: str = ""
    remedy: str = ""
    answers: bool | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """What is resident. `virtual_bytes` is address space, never use."""

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    locked_bytes: int
    swapped_bytes: int
    virtual_bytes: int

    @property
    def resident_bytes(self) -> int:
        """All of it."""
        return self.anonymous_bytes + self.file_bytes + self.shared_bytes


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """An open pipe or socket, or one of the three standard ones wherever it leads."""

    fd: int
    kind: str  # "pipe", "socket", "file", "other"
    target: str
    inode: int = 0
    mode: str = ""


class Descriptors(msgspec.Struct, frozen=True, kw_only=True, tag="descriptors"):
    """The descriptors that others are at the other end of."""

    open: tuple[Descriptor, ...]
    num_open: int

    def inode_of(self, fd: int) -> Descriptor | None:
        """What stands behind a descriptor's number."""
        return next((descriptor for descriptor in self.open if descriptor.fd == fd), None)


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag="limits"):
    """Resource limits with what is used of them; a limit of None is none."""

    max_open_files: int | None
    num_open_files: int | None  # None: of another user
    max_processes: int | None  # threads of the whole user count
    num_user_threads: int | None
    max_locked_bytes: int | None
    max_address_bytes: int | None
    num_threads: int


class Environment(msgspec.Struct, frozen=True, kw_only=True, tag="environment"):
    """The variables that matter; of secrets only the names."""

    variables: dict[str, str]
    hidden: tuple[str, ...] = ()


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded library as it was found in the maps."""

    name: str
    path: str
    is_deleted: bool = False
    build_id: str = ""  # of those of which two builds of one version differ


class Libraries(msgspec.Struct, frozen=True, kw_only=True, tag="libraries"):
    """The libraries that explain something: NCCL, torch, CUDA, interceptors."""

    libraries: tuple[Library, ...]


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a stack. `text`: the source there, of the innermost frames and where it could be read."""

    function: str
    file: str
    line: int
    text: str = ""


class StackThread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread's Python stack, innermost frame first."""

    tid: int
    name: str
    is_active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]


class PythonStacks(msgspec.Struct, frozen=True, kw_only=True, tag="stacks"):
    """The Python stacks of all threads; the first one is the main thread's."""

    threads: tuple[StackThread, ...]
    tool: str


class BlackBoxSeen(msgspec.Struct, frozen=True, kw_only=True, tag="blackbox"):
    """A black box of ours, its events cut to the latest. `is_alive`: its writer ran when it was read."""

    path: str
    box: Box
    is_alive: bool
    age_s: float | None = None  # since its last phase or event was written


class LogTail(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """The end of a log. `has_partial`: the last line has no end yet."""

    path: str
    size_bytes: int
    modified_wall_s: float
    lines: tuple[str, ...]
    has_partial: bool = False


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """How a process of the run ended, from what its supervisor or the process itself left."""

    name: str
    code: int | None = None
    signal: int | None = None
    was_told: bool | None = None  # by its supervisor
    is_oom: bool | None = None
    message: str = ""
    hint: str = ""


class SupervisorVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """What the supervisor of the run says of it. `is_stall`: everyone lived then, and nothing moved.

    `cause` and `grade` as in our own verdicts, where it has asked us; `given_wall_s` since 1970.
    """

    message: str
    hint: str
    subject: str
    is_stall: bool
    cause: str = ""
    grade: str = ""
    given_wall_s: float = 0.0


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag="listed"):
    """What somebody's `ps` or `top` printed about a process. The doctor itself never measures these two."""

    lifetime_cpu_percent: float | None = None
    virtual_bytes: int = 0
