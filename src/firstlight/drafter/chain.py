"""The true chain loop without an engine: drafts from captured states, verified against the answer itself.

The answers are greedy, so that what a target step would accept is what stands in the answer. Invariant: a
proposer sees the states and tokens up to its index and its own drafts, nothing later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from firstlight.engine.speculation.common_prefix import common_prefix
from firstlight.engine.speculation.ngram import continuation
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter
from firstlight.models.eagle3_unroll import UnrollRows

Propose = Callable[[int, int], list[int]]  # (index j, k): guesses of x_{j+2}, x_{j+3}, ...


@dataclass(frozen=True)
class Rounds:
    """What came of one answer: `accepted[i]` rounds took draft i; `emitted` has the target's own too."""

    num_rounds: int
    emitted: int
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a target step."""
        return self.emitted / max(self.num_rounds, 1)


def run_chain(tokens: list[int], first: int, k: int, propose: Propose) -> Rounds:
    """Decodes an answer with drafts: `tokens[j]` is x_{j+1}; x_{first + 1} is the first of the answer."""
    index, num_rounds, emitted = first, 0, 0
    accepted = [0] * k
    while index + 1 < len(tokens):
        right = tokens[index + 1 : index + 1 + k]
        taken = common_prefix(propose(index, len(right)), right)
        for place in range(taken):
            accepted[place] += 1
        step = min(taken + 1, len(tokens) - 1 - index)
        index, num_rounds, emitted = index + taken + 1, num_rounds + 1, emitted + step
    return Rounds(num_rounds, emitted, tuple(accepted))


def eagle_proposer(
    drafter: Eagle3Drafter,
    states_TCH: torch.Tensor,
    tokens: list[int],
) -> Propose:
    """Drafts of an EAGLE-3 drafter over one document; its keys are made anew from true states each round."""
    cache = DraftCache()
    with torch.no_grad():
        fused = drafter.fuse(states_TCH)
    known = torch.tensor(tokens)
    num_true = 0

    @torch.no_grad()
    def propose(index: int, k: int) -> list[int]:
        nonlocal num_true
        cache.truncate(num_true)
        fresh = slice(num_true, index + 1)
        output = drafter.advance(fused[fresh], known[fresh], cache)[-1:]
        num_true = index + 1
        drafts: list[int] = []
        for number in range(k):
            token = drafter.target_ids_R[drafter.logits(output).argmax(-1)]
            drafts.append(int(token))
            if number + 1 < k:
                output = drafter.advance(drafter.feedback(output), token, cache)
        return drafts

    return propose


@torch.no_grad()
def unrolled_proposer(
    drafter: Eagle3Drafter,
    k: int,
    states_TCH: torch.Tensor,
    tokens: list[int],
) -> Propose:
    """Like `eagle_proposer`, but the `k` drafts of all indices are made at once, some twenty times as fast.

    Drafts after a wrong one differ, as they follow the right token instead: they are rejected either way.
    """
    known = torch.tensor(tokens)
    index = torch.arange(len(tokens))
    rows = UnrollRows(states_TCH, known, index, index, torch.zeros_like(index))
    best = [drafter.logits(output).argmax(-1) for output in drafter.unroll(rows, k)]
    drafts = drafter.target_ids_R[torch.stack(best, 1)].tolist()
    return lambda index, k: drafts[index][:k]


def ngram_proposer(tokens: list[int]) -> Propose:
    """Prompt lookup as the engine does it: what `--drafter ngram` would guess."""
    known = np.array(tokens, np.int64)
    return lambda index, k: continuation(known[: index + 1], k)
