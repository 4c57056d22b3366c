"""What code needs of a black box, and the one that records nothing.

Invariant: no method fails, waits or takes more than a microsecond or two.
"""

from __future__ import annotations

from typing import Protocol

from firstlight.base.blackbox.layout import Counter


class EventRing(Protocol):
    """The latest events of one thread."""

    def write(self, name: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0) -> None: ...


class Recorder(Protocol):
    """See `writer.BlackBox`."""

    def name(self, text: str) -> int: ...

    def enter_phase(self, name: str, total: int = 0, unit: str = "", detail: str = "") -> None: ...

    def advance(self, done: int) -> None: ...

    def set(self, counter: Counter, value: int) -> None: ...

    def enter_collective(self, name: int, number: int) -> None: ...

    def leave_collective(self, name: int, number: int) -> None: ...

    def ring(self, name: str) -> EventRing: ...

    def place(self, counter: Counter) -> int: ...


class NoBox:
    """Records nothing."""

    def name(self, text: str) -> int:
        return 0

    def enter_phase(self, name: str, total: int = 0, unit: str = "", detail: str = "") -> None:
        return

    def advance(self, done: int) -> None:
        return

    def set(self, counter: Counter, value: int) -> None:
        return

    def enter_collective(self, name: int, number: int) -> None:
        return

    def leave_collective(self, name: int, number: int) -> None:
        return

    def ring(self, name: str) -> EventRing:
        return NoRing()

    def place(self, counter: Counter) -> int:
        return 0


class NoRing:
    """Keeps no event."""

    def write(self, name: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0) -> None:
        return
