"""Which token a drafter with logits guesses: the one that the target would draw, if it had these logits.

Noise and temperature are those with which the target's own token will be drawn, so that the two agree as
often as their distributions let them. Invariant: the same logits, seed and position give the same guess.

Shapes: B sequences, R tokens that the drafter knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from firstlight.engine.sampling.noise import gumbel, stream_key
from firstlight.engine.sampling.sampler import MIN_TEMPERATURE
from firstlight.engine.scheduler.sequence import Sequence


class Guess:
    """`ids_R` are the target's ids of the tokens that the drafter knows, int32."""

    def __init__(self, ids_R: torch.Tensor) -> None:
        self._ids_R = ids_R

    def draw(self, logits_LR: torch.Tensor, sequences: Rows[Sequence], place: int) -> None:
        """Makes the logits of rows whose sequence is sampled such that the largest is the drawn token's.

        `place` as below.
        """
        for row, sequence in enumerate(sequences):
            if not sequence.params.greedy:
                logits_LR[row] = self._drawn(logits_LR[row], sequence, place)

    def improve(
        self, best_B: np.ndarray, logits_BR: torch.Tensor, sequences: Rows[Sequence], place: int
    ) -> None:
        """Replaces the place of the largest logit by that of the drawn one, where a sequence is sampled.

        `place`: how many drafts of the sequence stand before this one.
        """
        for row, sequence in enumerate(sequences):
            if not sequence.params.greedy:
                best_B[row] = int(self._drawn(logits_BR[row], sequence, place).argmax())

    def _drawn(self, logits_R: torch.Tensor, sequence: Sequence, place: int) -> torch.Tensor:
        """Scaled logits with the noise of the position: the largest is the token that is drawn."""
        params = sequence.params
        key = stream_key(params.seed or 0, sequence.num_tokens + place)
        scaled_R = logits_R / max(params.temperature, MIN_TEMPERATURE)
        return gumbel([key], self._ids_R)[0].add_(scaled_R)
