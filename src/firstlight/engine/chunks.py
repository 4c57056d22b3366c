"""How many tokens of a prompt run in one step. Used by the scheduler; pure.

Invariant: as long as there is budget, every prompt advances.
"""

from __future__ import annotations

from firstlight.engine.request import Sequence

# A prompt chunk smaller than this is not worth its step, unless it ends the prompt.
MIN_CHUNK_TOKENS = 32


def chunk_of(sequence: Sequence, budget: int, *, others_wait: bool) -> int:
    """Tokens of a prompt for this step: all that fits, or half the budget when others wait for theirs."""
    left = len(sequence.tokens) - sequence.num_computed
    if others_wait and left > budget:
        budget = max(min(budget, MIN_CHUNK_TOKENS), budget // 2)
    return min(left, budget)
