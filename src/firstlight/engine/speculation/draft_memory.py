"""What is remembered of a sequence while drafts are made for it. It hangs on the sequence and ends with it.

Invariant: losing it loses no token, only speed.
"""

from __future__ import annotations

from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.drafter import Tree

# After so many steps in a row whose drafts were wrong, a sequence is left alone for a while, ever longer.
# Of a model that is right half the time, three misses say nothing: they come one time in eight.
MAX_MISSES, MAX_MISSES_OF_MODEL = 3, 8
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64  # tokens


class DraftMemory:
    """`num_misses` verifications in a row accepted nothing; no drafts before `resume_at` tokens.

    `tree`: what its drafts are in this step, where they are no chain.
    """

    __slots__ = ("num_misses", "own", "pause", "resume_at", "tree")

    def __init__(self) -> None:
        self.own: object = None
        self.tree: Tree | None = None
        self.num_misses = 0
        self.pause = SHORTEST_PAUSE
        self.resume_at = 0

    def record(self, num_accepted: int, num_tokens: int, max_misses: int) -> None:
        """Drafts were verified; the sequence has `num_tokens` now."""
        if num_accepted:
            self.num_misses, self.pause = 0, SHORTEST_PAUSE
            return
        self.num_misses += 1
        if self.num_misses >= max_misses:
            self.num_misses = max_misses - 1  # after the pause, one more look
            self.resume_at = num_tokens + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)


def memory_of(sequence: Sequence) -> DraftMemory:
    """The memory of a sequence; a new one at the first call."""
    if not isinstance(sequence.draft_memory, DraftMemory):
        sequence.draft_memory = DraftMemory()
    return sequence.draft_memory
