"""/proc read through a seam: another root is a recorded tree, and a test.

Nothing is cached: a process may vanish between two calls. Invariant: what cannot be read raises `OSError`
(`FileNotFoundError` and `ProcessLookupError`: it is gone; `PermissionError`: it belongs to somebody else),
except where a method says that it returns None.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_BYTES = 16 * 1024 * 1024
_OF_MEMORY = frozenset(("cmdline", "environ", "maps", "smaps", "smaps_rollup", "numa_maps", "auxv"))
_MEMORY_S = 1.0
_ACCESS_MODES = ("r", "w", "rw")


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """What /proc/P/stat says of a process, or /proc/P/task/T/stat of a thread; times in clock ticks."""

    pid: int
    comm: str
    state: str
    parent: int
    session: int
    minor_faults: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    num_threads: int
    start_ticks: int
    processor: int

    @property
    def cpu_s(self) -> float:
        """Processor time used so far."""
        return (self.user_ticks + self.system_ticks) / TICKS_PER_S


def parse_stat(text: str) -> Stat:
    """The command's name may hold spaces and brackets: the fields begin after the last bracket."""
    head, _, tail = text.rpartition(")")
    number, _, comm = head.partition("(")
    fields = tail.split()
    return Stat(
        pid=int(number),
        comm=comm,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        user_ticks=int(fields[11]),
        system_ticks=int(fields[12]),
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        processor=int(fields[36]) if len(fields) > 36 else -1,
    )


class ProcFs:
    """One /proc. `root` is the folder that holds the numbered ones."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self.root = root
        self._mute: set[str] = set()  # processes whose memory the kernel has locked

    def path(self, *parts: str | int) -> Path:
        """Where a file of this tree is; named in evidence as its source."""
        return self.root.joinpath(*map(str, parts))

    def text(self, *parts: str | int) -> str:
        """A small file's text; bytes that are no UTF-8 become replacement characters."""
        return self.data(*parts).decode("utf-8", "replace")

    def data(self, *parts: str | int) -> bytes:
        """A small file's bytes. Raises `TimeoutError` when the kernel does not give them: a process that
        waits for a page in the middle of a change of its mappings keeps others from its arguments.
        """
        if str(parts[-1]) not in _OF_MEMORY:
            return self._read(*parts)
        name, found = str(parts[0]), queue.SimpleQueue[bytes | OSError]()
        if name in self._mute:
            raise TimeoutError(errno.ETIMEDOUT, "its memory is locked", str(self.path(*parts)))
        threading.Thread(target=self._read_into, args=(found, parts), daemon=True).start()
        try:
            outcome = found.get(timeout=_MEMORY_S)
        except queue.Empty:
            self._mute.add(name)
            raise TimeoutError(errno.ETIMEDOUT, "its memory is locked", str(self.path(*parts))) from None
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def _read_into(self, found: queue.SimpleQueue[bytes | OSError], parts: tuple[str | int, ...]) -> None:
        try:
            found.put(self._read(*parts))
        except OSError as error:
            found.put(error)

    def _read(self, *parts: str | int) -> bytes:
        with self.path(*parts).open("rb") as file:
            return file.read(_MAX_BYTES)

    def names(self, *parts: str | int) -> list[str]:
        """The names in a folder."""
        return os.listdir(self.path(*parts))

    def pids(self) -> list[int]:
        """Every process that can be seen, in the order of their numbers."""
        return sorted(int(name) for name in self.names() if name.isdigit())

    def tids(self, pid: int) -> list[int]:
        """The threads of a process."""
        return sorted(int(name) for name in self.names(pid, "task") if name.isdigit())

    def stat(self, pid: int) -> Stat | None:
        """None when there is no such process. Readable whoever owns it."""
        try:
            return parse_stat(self.text(pid, "stat"))
        except (OSError, ValueError, IndexError):
            return None

    def is_same(self, pid: int, start_ticks: int) -> bool:
        """Whether the process still lives (a zombie does not) and its number was not given away."""
        stat = self.stat(pid)
        return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"

    def status(self, pid: int) -> dict[str, str]:
        """The fields of /proc/P/status."""
        return _fields(self.text(pid, "status"))

    def cmdline(self, pid: int) -> tuple[str, ...]:
        """The arguments; empty for a zombie and a thread of the kernel.

        A process that set its own title leaves one argument, filled up with zeros and blanks.
        """
        text = self.text(pid, "cmdline")
        return tuple(text.rstrip("\0 ").split("\0")) if text.strip("\0 ") else ()

    def environ(self, pid: int) -> dict[str, str]:
        """The variables that the process was started with."""
        pairs = (item.partition("=") for item in self.text(pid, "environ").split("\0") if item)
        return {name: value for name, _, value in pairs}

    def links(self, pid: int) -> Iterator[tuple[int, str]]:
        """The open descriptors and what they lead to: "pipe:[17]", "socket:[18]", a path."""
        for name in self.names(pid, "fd"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # just closed
                yield int(name), os.readlink(self.path(pid, "fd", name))

    def descriptor_mode(self, pid: int, fd: int) -> str:
        """How a descriptor was opened: "r", "w" or "rw"; empty when it was just closed."""
        try:
            fields = _fields(self.text(pid, "fdinfo", fd))
            return _ACCESS_MODES[int(fields.get("flags", "0"), 8) & 3]
        except (OSError, ValueError, IndexError):
            return ""

    def boot_wall_s(self) -> float:
        """When this machine (or container host) was booted, in seconds since 1970; 0 when it is not told."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.text("stat").splitlines():
                name, _, value = line.partition(" ")
                if name == "btime":
                    return float(value)
        return 0.0

    def start_wall_s(self, start_ticks: int) -> float:
        """The start of a process in seconds since 1970, to a second; 0 when it is not told."""
        boot_s = self.boot_wall_s()
        return boot_s + start_ticks / TICKS_PER_S if boot_s else 0.0


def kib_bytes(text: str) -> int:
    """The bytes of a field like "1234 kB"."""
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else 0


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
