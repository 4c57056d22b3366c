"""Giving the system back what the C library keeps of memory that was freed.

Invariant: where the C library cannot (it is not glibc), nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back_heap() -> None:
    """A start leaves tens of megabytes of holes behind: headers, texts and blocks of weights on their way."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
