"""Acceptance by a given profile, so that the cost of drafting can be measured without a good drafter.

Used by `engine.choosing` where `--draft-acceptance` was given. What is answered then is not the model's: a
forced draft stands where the model's token belongs. Invariant: the same seed and position decide the same.
"""

from __future__ import annotations

import torch

from firstlight.engine.noise import stream_key
from firstlight.engine.request import Sequence

_OTHER_STREAM = 0x5EED_D1CE  # so that the decisions do not follow the sampler's noise


class Synthetic:
    """`profile[i]` is the share of drafts accepted in place i, of those after accepted ones; see `Rule`."""

    def __init__(self, profile: tuple[float, ...]) -> None:
        self.profile = profile

    def token(self, sequence: Sequence, place: int, token: int, logits_V: torch.Tensor) -> int:  # noqa: N803
        """The draft where the profile accepts it; otherwise the sampler's token, or one beside it."""
        if place >= len(sequence.drafts):
            return token
        draft = sequence.drafts[place]
        chance = self.profile[min(place, len(self.profile) - 1)]
        low, _ = stream_key((sequence.params.seed or 0) ^ _OTHER_STREAM, sequence.num_tokens + place)
        if low < chance * 2**32:
            return draft
        return token if token != draft else max(draft - 1, 0) + (draft == 0)
