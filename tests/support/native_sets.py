"""The instruction sets that tests of the native operators run on: this processor's, and an emulated one.

Used by the tests of `ops`. Invariant: without a library every set is named, so that the tests fail with the
reason.
"""

from __future__ import annotations

from firstlight.ops.cpu.library import (
    INSTRUCTION_SETS,
    MissingLibraryError,
    Pool,
    open_library,
    open_pool,
)
from support.emulated import emulated_library

AVX2 = 2
EMULATED = "the code for AVX-512, its instruction emulated"


def instruction_sets() -> list[str]:
    """Their names."""
    try:
        available = open_library().fl_instruction_sets()
    except MissingLibraryError:
        return list(INSTRUCTION_SETS.values())
    names = [name for number, name in INSTRUCTION_SETS.items() if available & number]
    return [*names, EMULATED] if available & AVX2 else names


def pool_of(name: str, num_threads: int = 2) -> Pool:
    """Threads that run the code of one of them."""
    if name == EMULATED:
        return open_pool(emulated_library(), num_threads, instruction_set=AVX2)
    number = next(number for number, known in INSTRUCTION_SETS.items() if known == name)
    return open_pool(open_library(), num_threads, instruction_set=number)
