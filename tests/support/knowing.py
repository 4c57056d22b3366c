"""Drafters for tests: one that knows the answers and errs at will, so that runs of every length are accepted.

Invariant: the same seed errs in the same places of the same answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Rows

from firstlight.engine.plan import StepPlan
from firstlight.engine.request import Sequence


class Knowing:
    """Proposes what each request's `answers` say comes next; each token is wrong with the chance `wrong`.

    Beyond an answer's end it goes on guessing, as a drafter that does not see the end would.
    """

    name = "knowing"
    is_model = False
    layers = ()

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Nothing."""

    def __init__(self, answers: Mapping[str, Rows[int]], vocabulary: int, wrong: float = 0.3) -> None:
        self._answers, self._vocabulary, self._wrong = answers, vocabulary, wrong

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        return [self._drafts(sequence, num) for sequence in sequences]

    def _drafts(self, sequence: Sequence, num: int) -> list[int]:
        answer = self._answers.get(sequence.request_id, ())
        chance = random.Random(f"{sequence.request_id} {sequence.num_output}")
        drafts: list[int] = []
        for place in range(sequence.num_output, sequence.num_output + chance.randint(0, num)):
            token = answer[place] if place < len(answer) else chance.randrange(self._vocabulary)
            if chance.random() < self._wrong:
                token = (token + 1) % self._vocabulary
            drafts.append(token)
        return drafts
