"""Acceptance by a given profile, so that the cost of drafting can be measured without a good drafter.

Used by `engine.choosing` where `--draft-acceptance` was given. What is answered then is not the model's: a
forced draft stands where the model's token belongs. Invariant: the same seed and position decide the same.
"""

from __future__ import annotations

from firstlight.base.errors import UsageError
from firstlight.engine.noise import stream_key
from firstlight.engine.request import Sequence

_OTHER_STREAM = 0x5EED_D1CE  # so that the decisions do not follow the sampler's noise


class Synthetic:
    """`profile[i]` is the share of drafts accepted in place i, of those after accepted ones."""

    def __init__(self, profile: tuple[float, ...]) -> None:
        self.profile = profile

    def token(self, sequence: Sequence, place: int, token: int) -> int:
        """What counts as the target's token in that place, where the model chose `token`."""
        if place >= len(sequence.drafts):
            return token
        draft = sequence.drafts[place]
        chance = self.profile[min(place, len(self.profile) - 1)]
        low, _ = stream_key((sequence.params.seed or 0) ^ _OTHER_STREAM, sequence.num_tokens + place)
        if low < chance * 2**32:
            return draft
        return token if token != draft else max(draft - 1, 0) + (draft == 0)


def parse_profile(text: str) -> tuple[float, ...]:
    """The shares of "0.8,0.6,0.5". Raises a `UsageError` for anything else."""
    hint = "Give shares from 0 to 1, for the first draft on: 0.8,0.6,0.5."
    try:
        profile = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--draft-acceptance {text!r} is no list of numbers.", hint) from error
    if not all(0.0 <= share <= 1.0 for share in profile):
        raise UsageError(f"--draft-acceptance {text!r} has a share outside 0 to 1.", hint)
    return profile
