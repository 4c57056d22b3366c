"""Drafters for tests: one that knows the answers and errs at will, so that runs of every length are accepted.

Invariant: the same seed errs in the same places of the same answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Rows

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.drafter import Tree
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.speculation.tree import ROOT, behind, depths


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


class KnowingTrees(Knowing):
    """The same as trees of random forms: where a branch is right, one of the guesses behind it may be,
    too."""

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """Nothing."""

    def propose_trees(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        return [self._tree(sequence, shape) for sequence in sequences]

    def _tree(self, sequence: Sequence, shape: Shape) -> Tree:
        answer = self._answers.get(sequence.request_id, ())[sequence.num_output :]
        chance = random.Random(f"{sequence.request_id} {sequence.num_output}")
        drafts: list[int] = []
        parents: list[int] = []
        right = ROOT
        for place in range(chance.randint(0, shape.nodes)):
            depth = depths(parents)
            inner = [at for at in range(-1, place) if at == ROOT or depth[at] < shape.depth]
            # Mostly behind what is right, so that deep branches come.
            parent = right if right in inner and chance.random() < 0.6 else chance.choice(inner)
            num_before = 0 if parent == ROOT else depth[parent]
            taken = {drafts[at] for at in behind(drafts, parents, parent)} if parents else set()
            wanted = answer[num_before] if parent == right and num_before < len(answer) else None
            if wanted is not None and wanted not in taken and chance.random() >= self._wrong:
                drafts.append(wanted)
                right = place
            else:
                others = (chance.randrange(self._vocabulary) for _ in range(100))
                drafts.append(next(token for token in others if token not in taken and token != wanted))
            parents.append(parent)
        return drafts, parents
