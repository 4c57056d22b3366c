"""Acceptance by a given profile, so that the cost of drafting can be measured without a good drafter.

What is answered then is not the model's: a forced draft stands where the model's token belongs. Invariant:
the same seed and position decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from firstlight.engine.sampling.noise import stream_key
from firstlight.engine.sampling.sampler import History

_OTHER_STREAM = 0x5EED_D1CE  # so that the decisions do not follow the sampler's noise


class Synthetic:
    """`profile[i]` is the share of drafts accepted in place i, of those after accepted ones; see `Rule`."""

    def __init__(self, profile: tuple[float, ...]) -> None:
        self.profile = profile

    def token(
        self,
        history: History,
        place: int,
        drafts: Rows[int],
        token: int,
        logits_V: torch.Tensor,
    ) -> int:
        """The first draft where the profile accepts it; otherwise the sampler's token, or one beside it."""
        if not drafts:
            return token
        chance = self.profile[min(place, len(self.profile) - 1)]
        low, _ = stream_key((history.params.seed or 0) ^ _OTHER_STREAM, history.num_tokens)
        if low < chance * 2**32:
            return drafts[0]
        beside = (abs(token - distance) for distance in range(2 * len(drafts) + 1))
        return next(other for other in beside if other not in drafts)
