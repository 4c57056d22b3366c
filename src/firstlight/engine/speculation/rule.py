"""The seam for other ways to accept drafts than the keyed one, which needs no rule.

Called by `engine.choosing` for each token of a step that carries drafts. Implemented by `rejection_rule` and
`synthetic`. Invariant: the same sequence, seed and drafts give the same token.
"""

from __future__ import annotations

from typing import Protocol

import torch

from firstlight.engine.request import Sequence


class Rule(Protocol):
    """What stands in the place of the sampler's token; a draft is accepted iff it stands there."""

    def token(self, sequence: Sequence, place: int, token: int, logits_V: torch.Tensor) -> int:  # noqa: N803
        """The token after `place` accepted drafts, where the sampler chose `token`.

        `logits_V` are the model's, and may be changed in place.
        """
        ...
