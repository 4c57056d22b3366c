"""The seam for other ways to accept drafts than the keyed one, which needs no rule.

Invariant: the same sequence, seed and drafts give the same token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from firstlight.engine.sampling.sampler import History


class Rule(Protocol):
    """What stands in the place of the sampler's token; a draft is accepted iff it stands there."""

    def token(
        self,
        history: History,
        place: int,
        drafts: Rows[int],
        token: int,
        logits_V: torch.Tensor,
    ) -> int:
        """The token behind `history`, where the sampler chose `token`, and `drafts` are the guesses of it.

        `place` drafts were accepted before it. `drafts` are different ones; several if they are a tree, and
        none behind the last. `logits_V` are the model's, and may be changed in place.
        """
        ...
