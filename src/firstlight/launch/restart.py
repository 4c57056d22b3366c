"""How often an engine that was lost is started again, and after what pause: `--on-stall restart`.

Used by `launch.serve`. Invariant: an engine that fails at once, again and again, ends the server within a few
minutes instead of burning the machine for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MOST = 5
WINDOW_S = 600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_TURN_S = 0.25


class RestartLimit:
    """At most five restarts in ten minutes, the pause between them doubled each time."""

    most = MOST

    def __init__(self) -> None:
        self._restarts_s: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts of the last ten minutes."""
        return len(self._restarts_s)

    @property
    def pause_s(self) -> float:
        """How long to wait before the one that was allowed."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.count - 1))

    def allows_another(self, now_s: float) -> bool:
        """Count a restart if there is one left."""
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()
        if self.count >= MOST:
            return False
        self._restarts_s.append(now_s)
        return True

    def wait(self, turn: Callable[[], None]) -> None:
        """The pause, with a `turn` every now and then; a signal that ends the program ends it too."""
        end_s = time.monotonic() + self.pause_s
        while (left_s := end_s - time.monotonic()) > 0:
            turn()
            time.sleep(min(left_s, _TURN_S))
