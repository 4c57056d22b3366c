"""The queue of sequences that wait: by priority, then arrival, with removal in constant time.

Of the first few of one priority, the one goes first that finds most of its prompt in the prefix cache, before
that is evicted; nobody is passed over more than a few times. Invariant: `len` counts only what can still be
taken, and no step walks the queue, so that it costs the same however long it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from firstlight.engine.scheduler.sequence import Sequence

# How far a look for a cached prompt goes, and how often the first in line may be passed over for one.
WINDOW = 8
MAX_PASSED_OVER = 4


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        heapq.heappush(self._heap, (*sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The next one, or None. Entries of removed sequences are dropped on the way."""
        while self._heap:
            sequence = self._heap[0][2]
            if self._waiting.get(sequence.request_id) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self, num_cached: Callable[[Sequence], int] = lambda sequence: 0) -> Sequence:
        """The next one to run. `num_cached`: how many pages of a sequence's tokens are in the cache."""
        first = self._take()
        assert first is not None, "pop from an empty queue"
        if first.num_passed_over >= MAX_PASSED_OVER or not self._waiting:
            return first
        candidates = [first]
        while len(candidates) < WINDOW and (sequence := self.peek()) is not None:
            if sequence.priority != first.priority:
                break
            self._take()
            candidates.append(sequence)
        chosen = max(candidates, key=num_cached)  # of equals the first
        first.num_passed_over += chosen is not first
        for sequence in candidates:
            if sequence is not chosen:
                self.push(sequence)
        return chosen

    def _take(self) -> Sequence | None:
        sequence = self.peek()
        if sequence is not None:
            heapq.heappop(self._heap)
            del self._waiting[sequence.request_id]
        return sequence

    def remove(self, request_id: str) -> Sequence | None:
        """Takes a sequence out of the middle; None if it does not wait here."""
        removed = self._waiting.pop(request_id, None)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            # Clients that submit and abort behind a blocked head must not make the heap grow.
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._heap)
        return removed
