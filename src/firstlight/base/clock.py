"""Time as a seam: code that waits or measures takes a `Clock`, so that its tests need no sleep.

Invariant: `now_s` never goes back.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, in seconds from an arbitrary start."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
