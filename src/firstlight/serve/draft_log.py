"""What the log says of drafts: how many are made now, and why, when that has changed.

Fed by `EngineClient` with every step's counts. Invariant: a line at most every ten seconds, however often the
engine changes its mind; a step without a change costs two comparisons.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from firstlight.engine.speculation.counts import NO_STEP, DraftCounts

log = logging.getLogger(__name__)
LEAST_S = 10.0


class DraftLog:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: tuple[int, int] | None = None
        self._said_s = 0.0

    def saw(self, counts: DraftCounts | None) -> None:
        """The counts of a step; None without a drafter."""
        if counts is None or (counts.now, counts.nodes_now) == self._said:
            return
        if counts.reason == NO_STEP:
            return  # a prompt at most has run
        now_s = self._clock()
        if self._said is not None and now_s - self._said_s < LEAST_S:
            return
        self._said, self._said_s = (counts.now, counts.nodes_now), now_s
        log.info("drafts of %s: %d of %d; %s", counts.drafter, counts.now, counts.most, counts.reason)
