"""Writing a black box: in-place counters, phases, names, and a ring for each thread that has events.

The launcher makes the file before it starts a process; the process claims it as its first act, before it
imports torch. No lock, no system call and no thread: a store into mapped memory survives the process.
Invariant: what a reader sees is right after every single store, in the order in which they stand here.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import time
from pathlib import Path

from firstlight.base.blackbox.layout import (
    EVENT_BYTES,
    FILE_BYTES,
    MAGIC,
    NAME_BYTES,
    NO_RANK,
    NUM_NAMES,
    NUM_PHASES,
    NUM_RINGS,
    NUMBER_BITS,
    PHASE_BYTES,
    PHASE_WORDS,
    RING_EVENTS,
    RING_HEADER_BYTES,
    ROLE_BYTES,
    ROLE_OFFSET,
    RUN_BYTES,
    RUN_OFFSET,
    WORD,
    Counter,
    Header,
    counter_word,
    name_offset,
    pack_text,
    phase_offset,
    ring_offset,
)
from firstlight.base.blackbox.recorder import EventRing, NoRing
from firstlight.base.errors import ResourceError
from firstlight.base.proc_stat import read_proc_stat

_PHASE = struct.Struct(f"={PHASE_WORDS}Q{PHASE_BYTES - PHASE_WORDS * WORD}s")
_EVENT = struct.Struct("8Q")  # native: each word is stored as a whole, in this order
_NAME = struct.Struct(f"={NAME_BYTES - WORD}s")


def create_box(path: Path, *, role: str, rank: int | None, run_id: str) -> None:
    """Make the file of a process that is about to be started.

    All its bytes are allocated here, so that a full file system is an error now and never a SIGBUS later.
    Raises `ResourceError`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        with mmap.mmap(fd, FILE_BYTES) as memory, memoryview(memory).cast("Q") as words:
            memory[ROLE_OFFSET : ROLE_OFFSET + ROLE_BYTES] = pack_text(role, ROLE_BYTES)
            memory[RUN_OFFSET : RUN_OFFSET + RUN_BYTES] = pack_text(run_id, RUN_BYTES)
            words[Header.SIZE] = FILE_BYTES
            words[Header.RANK] = NO_RANK if rank is None else rank
            words[Header.MADE_WALL_NS] = time.time_ns()
            words[Header.MADE_MONOTONIC_NS] = time.monotonic_ns()
            words[Header.MAGIC] = MAGIC
    except OSError as error:
        os.unlink(path)
        reason = "no space is left" if error.errno == errno.ENOSPC else str(error.strerror)
        raise ResourceError(
            f"cannot make the black box of {role} in {path.parent}: {reason}.",
            f"Free {FILE_BYTES // 1024} KiB there (`df -h {path.parent}`); in a container, give it a larger "
            "/dev/shm with --shm-size.",
        ) from error
    finally:
        os.close(fd)


class BlackBox:
    """The writing end of one box; counters, names and phases are for one thread, rings for one each."""

    def __init__(self, path: Path) -> None:
        """Opens a box that `create_box` made; nothing in it changes yet."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        assert self._words[Header.MAGIC] == MAGIC, f"{path} is no black box of this version"
        self._lock = threading.Lock()  # names only: they are new a few hundred times in a process's life
        self._names = dict(self._committed_names())
        self._num_phases = self._count_phases()
        self._num_rings = 0

    def claim(self, pid: int | None = None) -> None:
        """Say whose box it is from now on: this process's, or that of one that knows nothing of boxes."""
        pid = os.getpid() if pid is None else pid
        stat = read_proc_stat(pid)
        self._words[Header.START_TICKS] = stat.start_ticks if stat is not None else 0
        self._words[Header.PID] = pid

    def name(self, text: str) -> int:
        """The number of a text, which is written down when it is new. 0 when no room is left."""
        known = self._names.get(text)
        return self._add_name(text) if known is None else known

    def enter_phase(self, name: str, total: int = 0, unit: str = "", detail: str = "") -> None:
        """Log that a phase begins and reset the odometer to it."""
        words, base = self._words, counter_word(Counter.STEP)
        before = words[base + Counter.DONE], words[base + Counter.TOTAL], words[base + Counter.UNIT]
        number, unit_number = self.name(name), self.name(unit) if unit else 0
        if self._num_phases == NUM_PHASES:
            words[Header.PHASES_DROPPED] += 1
        else:
            offset = phase_offset(self._num_phases)
            entry = pack_text(detail, PHASE_BYTES - PHASE_WORDS * WORD)
            _PHASE.pack_into(self._memory, offset, 0, time.monotonic_ns(), number, *before, entry)
            words[base + Counter.PHASE] = 0
            self._num_phases += 1
            words[offset // WORD] = self._num_phases
        words[base + Counter.DONE] = 0
        words[base + Counter.TOTAL] = total
        words[base + Counter.UNIT] = unit_number
        words[base + Counter.PHASE] = self._num_phases

    def advance(self, done: int) -> None:
        """Set the odometer of the phase; its last write is the process's heartbeat."""
        self._words[counter_word(Counter.DONE)] = done

    def set(self, counter: Counter, value: int) -> None:
        """Change one counter."""
        self._words[counter_word(counter)] = value

    def enter_collective(self, name: int, number: int) -> None:
        """This rank waits for the others in a collective; `name` is a name's number."""
        self._words[counter_word(Counter.ENTERED)] = name << NUMBER_BITS | number

    def leave_collective(self, name: int, number: int) -> None:
        """All others had arrived."""
        self._words[counter_word(Counter.LEFT)] = name << NUMBER_BITS | number

    def ring(self, name: str) -> EventRing:
        """A ring for events of the calling thread; one that keeps nothing when all are taken."""
        with self._lock:
            if self._num_rings == NUM_RINGS:
                return NoRing()
            index = self._num_rings
            self._num_rings += 1
        word = ring_offset(index) // WORD
        self._words[word + 1] = threading.get_native_id()
        self._words[word] = self.name(name)
        return Ring(self._memory, self._words, ring_offset(index) + RING_HEADER_BYTES)

    def place(self, counter: Counter) -> int:
        """Address of a counter in this process, for C code that writes it; good until the box is closed."""
        import ctypes  # here, because a child's first import should be a small one

        return ctypes.addressof(ctypes.c_uint64.from_buffer(self._memory, counter_word(counter) * WORD))

    def close(self) -> None:
        """Unmap; the file stays. Rings of this box must not be used any more."""
        self._words.release()
        self._memory.close()

    def _add_name(self, text: str) -> int:
        with self._lock:
            index = len(self._names)
            if index == NUM_NAMES:
                self._words[Header.NAMES_DROPPED] += 1
                return 0
            offset = name_offset(index)
            _NAME.pack_into(self._memory, offset + WORD, pack_text(text, NAME_BYTES - WORD))
            self._words[offset // WORD] = index + 1
            self._names[text] = index + 1
            return index + 1

    def _committed_names(self) -> list[tuple[str, int]]:
        found = []
        for index in range(NUM_NAMES):
            offset = name_offset(index)
            if self._words[offset // WORD] != index + 1:
                break
            data = bytes(self._memory[offset + WORD : offset + NAME_BYTES])
            found.append((data.rstrip(b"\0").decode(), index + 1))
        return found

    def _count_phases(self) -> int:
        count = 0
        while count < NUM_PHASES and self._words[phase_offset(count) // WORD] == count + 1:
            count += 1
        return count


class Ring:
    """The latest events of one thread."""

    def __init__(self, memory: mmap.mmap, words: memoryview[int], offset: int) -> None:
        self._memory = memory
        self._words = words
        self._offset = offset
        self._count = 0

    def write(self, name: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0) -> None:
        """Record an event: a name's number and up to five values from 0 to 2**64 - 1."""
        offset = self._offset + (self._count & RING_EVENTS - 1) * EVENT_BYTES
        # By itself, as packing clears the record in an order of its own: a kill would leave the old number.
        self._words[offset >> 3] = 0
        _EVENT.pack_into(self._memory, offset, 0, time.monotonic_ns(), name, a, b, c, d, e)
        self._count += 1
        self._words[offset >> 3] = self._count
