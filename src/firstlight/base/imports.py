"""How far a process's imports are: every module that is looked for moves the odometer of its phase.

An import of torch takes seconds and can hang in a library's constructor. Invariant: imports give what they
gave without it; what is put off comes when the first name of it is used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from firstlight.base.blackbox.recorder import Recorder
from firstlight.base.phases import IMPORTS


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
    recorder.enter_phase(IMPORTS, 0, "modules", detail)
    counter = _Counter(recorder)
    sys.meta_path.insert(0, counter)
    gc.disable()  # what modules make stays: looking through it for garbage is a tenth of the time
    try:
        yield
    finally:
        gc.freeze()  # and it need not be looked through later
        gc.enable()
        sys.meta_path.remove(counter)


def put_off(*names: str) -> None:
    """Modules that others import on their way and we most likely never use: they are empty until then."""
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = _PutOff(name)


class _PutOff(ModuleType):
    """In the place of a module until a name of it, or a module inside it, is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # the import system's own questions
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
