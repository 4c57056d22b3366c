"""How far a process's imports are: every module that is looked for moves the odometer of its phase.

Entered by a rank around its import of torch, which takes seconds and can hang in a library's constructor.
Invariant: it finds nothing itself, so imports give what they gave without it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from firstlight.base.blackbox.recorder import Recorder


class _Counter:
    """First in `sys.meta_path`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._count = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        self._count += 1
        self._recorder.advance(self._count)
        return None


@contextlib.contextmanager
def counted_imports(recorder: Recorder, detail: str) -> Iterator[None]:
    """Enter the phase "imports" and count modules in it."""
    recorder.enter_phase("imports", 0, "modules", detail)
    counter = _Counter(recorder)
    sys.meta_path.insert(0, counter)
    try:
        yield
    finally:
        sys.meta_path.remove(counter)
