"""Which CPU operators a rank uses: our own where the library loads, PyTorch's otherwise, with the reason.

Invariants: a machine without a compiler serves the same models, only slower, and the start-up report says so;
all ranks take the same operators.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from firstlight.base.errors import ResourceError
from firstlight.ops.collectives import Group
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.check import confirmed_set
from firstlight.ops.cpu.library import MissingLibraryError, open_library, open_pool, require_same
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.packed import formats_here
from firstlight.ops.kv_rows import refused

REMEDY = "Install g++ 9 or newer (Debian: apt-get install g++) and start again."


def pick_cpu_kernels(
    wanted: str,
    num_threads: int,
    group: Group | None = None,
    on_compile: Callable[[int, int], None] = lambda done, total: None,
    kv_dtype: str = "auto",
) -> CpuBackend | NativeBackend:
    """`wanted` is the setting cpu-kernels: "auto", "native" or "stock". `on_compile`: see `open_library`.

    Raises `ResourceError` where "native" is wanted and cannot be had, and `UnsupportedError` for a `kv_dtype`
    that the operators cannot hold.
    """
    group = group or Group()
    if wanted == "stock":
        _require_automatic(
            kv_dtype, "--cpu-kernels stock takes", "Use --kv-dtype auto, or --cpu-kernels auto."
        )
        return CpuBackend("--cpu-kernels stock: PyTorch's operators, chosen by measurement")
    library: ctypes.CDLL | None = None
    missing, remedy = "another rank has none", REMEDY
    try:
        library = open_library(on_compile)
    except MissingLibraryError as error:
        missing, remedy = str(error), error.hint or REMEDY
    if group.agree_on_least("cpu-kernels", library is not None) and library is not None:
        require_same(library, formats_here())
        instruction_set, note = confirmed_set(library)
        pool = open_pool(library, num_threads, places(num_threads, group.rank, group.size), instruction_set)
        return NativeBackend(pool, note, kv_dtype)
    if wanted == "native":
        raise ResourceError(f"there is no library of our own CPU kernels: {missing}.", remedy)
    without = f"there is no library of our own CPU kernels ({missing}), and PyTorch's take"
    _require_automatic(kv_dtype, without, f"Use --kv-dtype auto. {remedy}")
    return CpuBackend(f"PyTorch's operators, which are slower: no library of our own, {missing}. {remedy}")


def _require_automatic(kv_dtype: str, who_takes: str, remedy: str) -> None:
    if kv_dtype != "auto":
        raise refused(kv_dtype, f"{who_takes} keys in float32 and values in float16 only", remedy)


def places(num_threads: int, rank: int, num_ranks: int) -> list[int] | None:
    """Processors of a rank's threads, each rank beside the other; None unless the ranks take all there are.

    Where some are left, another process may have its threads on the first ones, too.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if num_threads * num_ranks != len(allowed):
        return None
    return allowed[rank * num_threads : (rank + 1) * num_threads]
