"""Collectives through memory that the ranks of one machine share, carried by the native library.

Opened by `collectives.join`. The memory has no name: rank 0 makes it, the others open it through its
descriptor, and it is gone with the last of them. `native/exchange.cpp` waits and adds; when to give up is
decided here. Invariant: sums are made in the order of the ranks, so all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable

import msgspec
import torch

from firstlight.base.proc_stat import read_proc_stat
from firstlight.ops.cpu.library import MissingLibraryError
from firstlight.ops.rendezvous import Rendezvous, named
from firstlight.ops.transport import Call, CollectiveError

SLOT_BYTES = 2**20  # a longer message goes in pieces; a rank has two slots
SPIN_NS = 50_000  # about what waking a thread costs: so nobody waits for more than twice as long as it must
SLICE_S = 0.05  # how long the library waits before we look whether the others live
LATER_SLICE_S = 0.25  # seldom enough to be seen as one who waits
TOPIC = "memory"
_SILENT = "did not say whether memory can be shared"


class Word(msgspec.Struct, frozen=True):
    """What a rank says of itself. `trouble`: why it has no part in the memory; empty where all is well.

    Rank 0 says where the memory is: its descriptor, and a secret that lies in the memory's last bytes.
    """

    pid: int
    start_ticks: int
    trouble: str = ""
    descriptor: int = -1
    secret: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether that process still runs."""
        stat = read_proc_stat(self.pid)
        return stat is not None and stat.state not in "ZX" and stat.start_ticks == self.start_ticks


class SharedMemory:
    """See `transport.Transport`. `words` by rank."""

    def __init__(self, library: ctypes.CDLL, memory: mmap.mmap, rank: int, ranks: list[Word]) -> None:
        self.words = f"shared memory of {len(ranks)} ranks"
        self._library, self._memory = library, memory
        self._rank, self._ranks = rank, ranks
        self._place = ctypes.c_char.from_buffer(memory)  # keeps the memory mapped
        has_core_each = len(ranks) <= len(os.sched_getaffinity(0))
        self._handle = library.fl_exchange_open(
            ctypes.addressof(self._place), rank, len(ranks), SLOT_BYTES, SPIN_NS if has_core_each else 0
        )
        assert self._handle, "sizes that the library does not take"
        self._signs: dict[str, int] = {}
        self._widths: dict[tuple[int, ...], ctypes.Array[ctypes.c_int64]] = {}

    def sum(self, call: Call, whole: torch.Tensor) -> None:
        assert whole.is_contiguous(), "see Transport"
        sign, wait_ns = self._sign(call.name), _slice_ns(call.deadline_s)
        state = self._library.fl_exchange_sum(
            self._handle, whole.data_ptr(), whole.numel(), sign, call.number, wait_ns
        )
        if state:
            self._wait(call, state)

    def join_columns(self, call: Call, mine_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        assert mine_RC.is_contiguous(), "see Transport"
        all_RC = torch.empty(len(mine_RC), sum(widths))
        self._join(call, mine_RC, all_RC, tuple(4 * width for width in widths))
        return all_RC

    def least(self, call: Call, value: int) -> int:
        values = torch.empty(1, len(self._ranks), dtype=torch.int64)
        self._join(call, torch.tensor([[value]]), values, (8,) * len(self._ranks))
        return int(values.min())

    def leave(self) -> None:
        self._library.fl_exchange_close(self._handle)
        self._handle = None

    def _join(self, call: Call, mine: torch.Tensor, everyone: torch.Tensor, widths: tuple[int, ...]) -> None:
        """`widths` in bytes of a row."""
        if widths not in self._widths:
            self._widths[widths] = (ctypes.c_int64 * len(widths))(*widths)
        state = self._library.fl_exchange_join(
            self._handle,
            mine.data_ptr(),
            everyone.data_ptr(),
            len(mine),
            self._widths[widths],
            self._sign(call.name),
            call.number,
            _slice_ns(call.deadline_s),
        )
        if state:
            self._wait(call, state)

    def _sign(self, name: str) -> int:
        """The same number for the same name on every rank."""
        if name not in self._signs:
            self._signs[name] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        return self._signs[name]

    def _wait(self, call: Call, state: int) -> None:
        """A slice of time went by, and a rank is missing; or it is somewhere else."""
        give_up_s = time.monotonic() + call.deadline_s - SLICE_S
        while state > 0:
            dead = [rank for rank, word in enumerate(self._ranks) if not word.is_alive]
            is_over = bool(dead) or time.monotonic() >= give_up_s
            # What the dead have left before they died still counts.
            state = self._library.fl_exchange_go(self._handle, 0 if is_over else _slice_ns(LATER_SLICE_S))
            if state > 0 and dead:
                raise CollectiveError(f"was broken off: {self._said_of(dead, call, 'died')}")
            if state > 0 and is_over:
                raise CollectiveError(
                    f"did not complete within {call.deadline_s:.0f} s: {self._missing(call, state)}"
                )
        if state < 0:
            other = -1 - state
            number = self._library.fl_exchange_number(self._handle, other)
            where = f"rank {other} came to number {number} with another name or size"
            raise CollectiveError(f"met another one, a collective mismatch: {where}")

    def _missing(self, call: Call, state: int) -> str:
        numbers = [self._library.fl_exchange_number(self._handle, rank) for rank in range(len(self._ranks))]
        absent = [rank for rank, number in enumerate(numbers) if number < call.number]
        if absent:
            return self._said_of(absent, call, "did not come to it")
        return f"rank {state - 1} came to it and stopped inside"

    def _said_of(self, ranks: list[int], call: Call, what: str) -> str:
        numbers = {self._library.fl_exchange_number(self._handle, rank) for rank in ranks}
        last = f", after number {min(numbers)}" if len(numbers) == 1 and max(numbers) < call.number else ""
        return f"{named(ranks)} {what}{last}"


def open_shared(meeting: Rendezvous, find_library: Callable[[], ctypes.CDLL]) -> SharedMemory | str:
    """Called by every rank; the memory, or on all of them why there is none, as the end of a sentence."""
    library, trouble = None, ""
    try:
        library = _declared(find_library())
    except MissingLibraryError as error:
        trouble = str(error)
    memory: mmap.mmap | None = None
    own = word = Word(os.getpid(), _start_ticks(), trouble)
    if meeting.rank == 0 and library is not None:
        memory, own = _make(library, meeting.size, own)
    elif library is not None:
        (said,) = meeting.hear(TOPIC, [0], _SILENT)
        word = msgspec.json.decode(said, type=Word)
        memory, own = (None, own) if word.trouble else _open(library, meeting.size, word, own)
    meeting.say(TOPIC, msgspec.json.encode(own).decode())
    try:
        said_by = meeting.hear(TOPIC, range(meeting.size), _SILENT)
    finally:
        if own.descriptor >= 0:
            os.close(own.descriptor)
    words = [msgspec.json.decode(said, type=Word) for said in said_by]
    for rank, word in enumerate(words):
        if word.trouble:
            return f"as rank {rank} says: {word.trouble}"
    assert library is not None, "no trouble"
    assert memory is not None, "no trouble"
    return SharedMemory(library, memory, meeting.rank, words)


def _make(library: ctypes.CDLL, size: int, own: Word) -> tuple[mmap.mmap | None, Word]:
    """Memory that only whoever may look into this process can open, and that nobody can cut short."""
    secret = secrets.token_bytes(16)
    num_bytes = _num_bytes(library, size)
    try:
        descriptor = os.memfd_create("firstlight-collectives", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return None, msgspec.structs.replace(own, trouble=f"no memory can be made ({error.strerror})")
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, num_bytes)  # a lack of memory is an error now and no SIGBUS later
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        memory = mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        return None, msgspec.structs.replace(
            own, trouble=f"{num_bytes} bytes cannot be had ({error.strerror})"
        )
    memory[num_bytes - len(secret) :] = secret
    return memory, msgspec.structs.replace(own, descriptor=descriptor, secret=secret.hex())


def _open(library: ctypes.CDLL, size: int, maker: Word, own: Word) -> tuple[mmap.mmap | None, Word]:
    """The memory that rank 0 made; what cannot be opened is another machine's, or another container's."""
    path = f"/proc/{maker.pid}/fd/{maker.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        trouble = f"it cannot open rank 0's memory ({path}: {error.strerror})"
        return None, msgspec.structs.replace(own, trouble=trouble)
    try:
        memory = mmap.mmap(descriptor, _num_bytes(library, size))
    except (OSError, ValueError) as error:
        return None, msgspec.structs.replace(own, trouble=f"{path} is no memory of this run ({error})")
    finally:
        os.close(descriptor)
    if memory[-len(maker.secret) // 2 :].hex() != maker.secret:
        return None, msgspec.structs.replace(own, trouble=f"{path} is another machine's process")
    return memory, own


def _num_bytes(library: ctypes.CDLL, size: int) -> int:
    """A page more than the library needs, which has the secret at its end."""
    num_pages = -(-int(library.fl_exchange_bytes(size, SLOT_BYTES)) // mmap.PAGESIZE)
    return (num_pages + 1) * mmap.PAGESIZE


def _start_ticks() -> int:
    stat = read_proc_stat(os.getpid())
    return 0 if stat is None else stat.start_ticks


def _slice_ns(deadline_s: float) -> int:
    return int(1e9 * min(SLICE_S, deadline_s))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32, int64, uint64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    library.fl_exchange_bytes.restype = int64
    library.fl_exchange_bytes.argtypes = (int32, int64)
    library.fl_exchange_open.restype = pointer
    library.fl_exchange_open.argtypes = (pointer, int32, int32, int64, int64)
    library.fl_exchange_close.argtypes = (pointer,)
    library.fl_exchange_go.argtypes = (pointer, int64)
    library.fl_exchange_sum.argtypes = (pointer, pointer, int64, uint64, uint64, int64)
    library.fl_exchange_join.argtypes = (pointer, pointer, pointer, int64, pointer, uint64, uint64, int64)
    library.fl_exchange_number.restype = uint64
    library.fl_exchange_number.argtypes = (pointer, int32)
    return library
