"""The native library: found or compiled, loaded with ctypes, and its thread pool.

The structures here mirror `native/program.h`. Invariant: a `Pool` runs one program at a time, and keeps no
reference to the memory it was given.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from firstlight.base.environment import cache_place
from firstlight.base.errors import EngineError, ResourceError
from firstlight.base.failure import address_limit
from firstlight.ops.cpu.build import COMPILE_LIMIT_S, SOURCES, BuildError, compile_library, library_name

EMBED, NORM, QUANTIZE, LINEAR, SILU, TURN_AND_WRITE, ATTEND, LARGEST, READ, MULTIPLY = range(10)
TOP, EXPERTS, PACK, COPY = range(10, 14)
CHOOSE, SORT, GATHER, COMBINE, LATENT, BY_HEAD, HEADS = range(14, 21)
NUM_OPERATORS = 21
ADD_TO_OUTPUT, LOGIT_ROWS, TO_SLOTS, EACH = 1, 2, 4, 8
KV_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.int8: 2}  # `KVType` in `native/program.h`
INSTRUCTION_SETS = {4: "AVX-512", 2: "AVX2", 1: "portable"}
PORTABLE = 1
TILE, GROUP, GROUP_BYTES = 8, 32, 64
# Looks at a barrier before a thread sleeps: some tens of microseconds.
NUM_LOOKS = 4000
_FEWER = "Raise the limit, or use fewer --threads."
OnCompile = Callable[[int, int], None]


class Op(ctypes.Structure):
    """One operator of a program."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("n", ctypes.c_int64 * 8),
        ("f", ctypes.c_float * 2),
        ("p", ctypes.c_void_p * 8),
        ("label", ctypes.c_uint64),
    )


class Step(ctypes.Structure):
    """What changes from one run of a program to the next."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("num_rows", "num_logits", "num_sequences", "page_size", "table_width")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tokens",
                "turns",
                "write_slots",
                "logit_rows",
                "starts",
                "counts",
                "pages",
                "branches",
            )
        ),
        ("branch_width", ctypes.c_int64),
    )


class Codes:
    """Room for `max_rows` rows of activations as 8-bit codes in groups of 32, the largest of each in 16."""

    def __init__(self, max_rows: int, width: int) -> None:
        assert width % GROUP == 0, "codes come in whole groups"
        self.width = width
        self.groups = torch.empty(max_rows, width // GROUP, GROUP_BYTES, dtype=torch.uint8)
        self._struct = ctypes.c_void_p(self.groups.data_ptr())
        self.address = ctypes.addressof(self._struct)


class MissingLibraryError(Exception):
    """Why the native library cannot be used, as the end of a sentence. `hint`: what helps, if no compiler."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True)
class Pool:
    """Threads that run programs. `instruction_set` is a key of `INSTRUCTION_SETS`."""

    library: ctypes.CDLL
    handle: int
    num_threads: int
    instruction_set: int

    def run(
        self, ops: ctypes.Array[Op] | Sequence[Op], step: Step, counter: int = 0, number: int = 0
    ) -> None:
        """Runs a program on a step; raises `ResourceError` if the threads' own memory cannot be had.

        `counter`: address of an 8-byte word that becomes `number` when the program is done, or 0.
        """
        program = ops if isinstance(ops, ctypes.Array) else (Op * len(ops))(*ops)
        if self.library.fl_run(
            self.handle, program, len(program), ctypes.byref(step), counter or None, number
        ):
            raise ResourceError("memory for the operators' threads is exhausted", "Use fewer --threads.")

    def watch(self, place: int) -> None:
        """From now on the 8-byte word at this address has the label of the operator that runs; 0 for none."""
        self.library.fl_watch(self.handle, place)

    def time(self, words: int | None) -> None:
        """From now on `NUM_OPERATORS` 8-byte words at this address grow by the nanoseconds that operators of
        each kind take; None: no longer."""
        self.library.fl_time(self.handle, words)


def open_library(on_compile: OnCompile = lambda done, total: None) -> ctypes.CDLL:
    """The library that belongs to the sources; compiled if it is nowhere. Raises `MissingLibraryError`.

    `on_compile(done, total)` hears how many files are compiled, once or more if any are.
    """
    name = library_name()
    packaged = SOURCES / name
    path = packaged if packaged.exists() else cache_place("native", name)
    try:
        if not path.exists():
            _compile_once(path, on_compile)
        return load(path)
    except BuildError as error:
        raise MissingLibraryError(str(error)) from error
    except OSError as error:
        raise MissingLibraryError(
            f"it cannot be kept in {path.parent}: {error.strerror or error}",
            "Name a folder that can be written to in FIRSTLIGHT_CACHE.",
        ) from error


def load(path: Path) -> ctypes.CDLL:
    """Loads a compiled library and declares its functions.

    From a copy in memory where its file system lets nothing be run, as a container's /tmp often does not.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        if "failed to map segment" not in str(error):
            raise
        with open(os.memfd_create(path.name), "wb") as copy:
            copy.write(path.read_bytes())
            copy.flush()
            library = ctypes.CDLL(f"/proc/self/fd/{copy.fileno()}")
    library.fl_interface.restype = ctypes.c_int64
    library.fl_interface.argtypes = (ctypes.c_char_p,)
    require_same(library, mirrored())
    library.fl_pool.restype = ctypes.c_void_p
    library.fl_pool.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    library.fl_watch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.fl_time.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.fl_end_pool.argtypes = (ctypes.c_void_p,)
    library.fl_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
    )
    return library


def mirrored() -> dict[str, int]:
    """What of `native/program.h` is stated here again, by the names that `native/interface.cpp` has."""
    operators = (
        *("EMBED", "NORM", "QUANTIZE", "LINEAR", "SILU", "TURN_AND_WRITE", "ATTEND", "LARGEST", "READ"),
        *("MULTIPLY", "TOP", "EXPERTS", "PACK", "COPY", "CHOOSE", "SORT", "GATHER", "COMBINE", "LATENT"),
        *("BY_HEAD", "HEADS"),
    )
    names = ("NUM_OPERATORS", "ADD_TO_OUTPUT", "LOGIT_ROWS", "TO_SLOTS", "EACH", "TILE", "GROUP")
    here = globals()
    facts = {f"OP_{name}": here[name] for name in operators} | {name: here[name] for name in names}
    facts |= zip(("KV_HALF", "KV_BFLOAT", "KV_CODES"), KV_TYPES.values(), strict=True)
    facts |= {"Group": GROUP_BYTES, "Quantized": ctypes.sizeof(ctypes.c_void_p)}
    for kind in (Op, Step):
        facts[kind.__name__] = ctypes.sizeof(kind)
        facts |= {f"{kind.__name__}.{field[0]}": getattr(kind, field[0]).offset for field in kind._fields_}
    return facts


def require_same(library: ctypes.CDLL, facts: Mapping[str, int]) -> None:
    """Raises `EngineError` where the library has another number, or none, for one of these names."""
    for name, here in facts.items():
        there = library.fl_interface(name.encode())
        if there != here:
            shown = "unknown" if there < 0 else there
            raise EngineError(
                f"the native library and its mirror in Python differ: {name} is {shown} there, {here} here.",
                "Change `native/program.h` and `ops/cpu/library.py` together; of an installed firstlight: "
                "reinstall it.",
            )


def open_pool(
    library: ctypes.CDLL, num_threads: int, cpus: Sequence[int] | None = None, instruction_set: int = 0
) -> Pool:
    """A pool of threads, the caller being one of them. `cpus`: where to pin the others; None: nowhere.

    The caller itself stays free, because the threads that it makes later would inherit its place. The threads
    end with the pool.
    Raises `ResourceError` where one cannot be started.
    `instruction_set` 0 takes the best that this processor has, unchecked; see `check.confirmed_set`.
    """
    best = instruction_set or max(s for s in INSTRUCTION_SETS if library.fl_instruction_sets() & s)
    pinned = None if cpus is None else (ctypes.c_int32 * num_threads)(*cpus)
    handle = library.fl_pool(num_threads, pinned, best, NUM_LOOKS)
    if handle is None:
        raise ResourceError(f"{num_threads} operator threads cannot be started: {_why_no_thread()}.", _FEWER)
    pool = Pool(library, handle, num_threads, best)
    weakref.finalize(pool, library.fl_end_pool, handle)
    return pool


def _why_no_thread() -> str:
    """The system has one number for both reasons; a limited address space is the likelier of them."""
    if limit := address_limit():
        return f"Cannot allocate memory ({limit}: ulimit -v)"
    return "Resource temporarily unavailable (a limit of threads: ulimit -u, or the group's pids.max)"


def address(values: torch.Tensor | np.ndarray | None) -> int | None:
    """Where the values lie; the caller keeps them alive."""
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, torch.Tensor) else values.ctypes.data


def _compile_once(path: Path, on_compile: OnCompile) -> None:
    """Of several processes that start together, one compiles and the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on_compile(0, 0)
    with open(path.with_suffix(".lock"), "w") as lock:
        _wait_for(lock, time.monotonic() + COMPILE_LIMIT_S)
        if not path.exists():
            compile_library(path, on_done=on_compile)


def _wait_for(lock: IO[str], until_s: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until_s:
                raise BuildError(f"another process has been compiling for {COMPILE_LIMIT_S:.0f} s") from error
            time.sleep(0.1)
        else:
            return
