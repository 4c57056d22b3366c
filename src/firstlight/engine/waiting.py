"""The queue of sequences that wait: by priority, then arrival, with removal in constant time.

Used by the scheduler. Invariant: `len` counts only what can still be taken, and no step walks the queue,
so that a step costs the same however long it is.
"""

from __future__ import annotations

import heapq

from firstlight.engine.request import Sequence


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

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
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
