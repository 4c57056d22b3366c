"""Which CPU operators a rank uses: our own where the library loads, PyTorch's otherwise, with the reason.

Called once by `engine.startup`. Invariant: a machine without a compiler serves the same models, only slower,
and the start-up report says so.
"""

from __future__ import annotations

import os

from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.check import confirmed_set
from firstlight.ops.cpu.library import MissingLibraryError, open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend


def pick_cpu_kernels(wanted: str, num_threads: int, rank: int) -> CpuBackend | NativeBackend:
    """`wanted` is the setting cpu-kernels: "auto" or "stock"."""
    if wanted == "stock":
        return CpuBackend("--cpu-kernels stock: PyTorch's operators, chosen by measurement")
    try:
        library = open_library()
    except MissingLibraryError as error:
        return CpuBackend(f"stock PyTorch operators, because our own kernels are not there: {error}")
    instruction_set, note = confirmed_set(library)
    pool = open_pool(library, num_threads, places(num_threads, rank), instruction_set)
    return NativeBackend(pool, note)


def places(num_threads: int, rank: int) -> list[int] | None:
    """Processors of a rank's threads, each rank beside the other; None where they do not suffice."""
    allowed = sorted(os.sched_getaffinity(0))
    mine = allowed[rank * num_threads : (rank + 1) * num_threads]
    return mine if len(mine) == num_threads else None
