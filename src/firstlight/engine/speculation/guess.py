"""Which token a drafter with logits guesses: the one that the target would draw, if it had these logits.

Called by drafters. Noise and temperature are those with which the target's own token will be drawn, so that
the two agree as often as their distributions let them. Invariant: the same logits, seed and position give
the same guess.

Shapes: B sequences, R tokens that the drafter knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from firstlight.engine.noise import gumbel, stream_key
from firstlight.engine.request import Sequence
from firstlight.engine.sampler import MIN_TEMPERATURE


class Guess:
    """`ids_R` are the target's ids of the tokens that the drafter knows, int32."""

    def __init__(self, ids_R: torch.Tensor) -> None:  # noqa: N803 - shape suffix
        self._ids_R = ids_R

    def draw(self, logits_LR: torch.Tensor, sequences: Rows[Sequence], place: int) -> None:  # noqa: N803
        """Makes the logits of rows whose sequence is sampled such that the largest is the drawn token's.

        `place` as below.
        """
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if not params.greedy:
                key = stream_key(params.seed or 0, sequence.num_tokens + place)
                logits_LR[row].div_(max(params.temperature, MIN_TEMPERATURE)).add_(
                    gumbel([key], self._ids_R)[0]
                )

    def improve(
        self, best_B: np.ndarray, logits_BR: torch.Tensor, sequences: Rows[Sequence], place: int
    ) -> None:  # noqa: N803
        """Replaces the place of the largest logit by that of the drawn one, where a sequence is sampled.

        `place`: how many drafts of the sequence stand before this one.
        """
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if params.greedy:
                continue
            key = stream_key(params.seed or 0, sequence.num_tokens + place)
            scaled_R = logits_BR[row] / max(params.temperature, MIN_TEMPERATURE)  # noqa: N806
            best_B[row] = int(gumbel([key], self._ids_R)[0].add_(scaled_R).argmax())
