"""Recent shares of drafts that were right, by which the policy weighs what more of them would bring.

Invariant: what was long ago counts less and less, and nothing counts for ever.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from firstlight.engine.speculation.shape import Shape

# Acceptance of the first draft, and of each later one after the one before it, until more is known.
FIRST_GUESS = 0.6
PRIOR_WEIGHT = 2.0
KEPT = 1.0 - 1.0 / 48.0  # of a count, at each verification: the last few dozen matter
PAST_WEIGHT = 4.0  # at most, of all that was before a look
_LEAST_COVERAGE = 0.02  # a drafter that knew nothing for long may know something now


class Acceptance:
    """Recent shares: of drafts that were right after all before them were, and of sequences with any."""

    def __init__(self, most: int) -> None:
        self._reached = [PRIOR_WEIGHT] * most
        self._accepted = [PRIOR_WEIGHT * FIRST_GUESS] * most
        self._asked = self._answered = 1.0

    def begin(self, reached: Rows[int], accepted: Rows[int]) -> None:
        """Starts anew from counts by place, as in `DraftCounts`."""
        for place, (num_reached, num_accepted) in enumerate(zip(reached, accepted, strict=True)):
            self._reached[place] = PRIOR_WEIGHT + num_reached
            self._accepted[place] = PRIOR_WEIGHT * FIRST_GUESS + num_accepted

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's drafts were verified."""
        for place in range(min(num_drafted, num_accepted + 1)):
            self._reached[place] = KEPT * self._reached[place] + 1.0
            self._accepted[place] = KEPT * self._accepted[place] + (place < num_accepted)

    def record_coverage(self, num_asked: int, num_answered: int) -> None:
        """The drafter was asked for so many sequences, and knew something of so many."""
        self._asked = KEPT * self._asked + num_asked
        self._answered = KEPT * self._answered + num_answered

    def loosen(self) -> None:
        """What comes next shall count, whatever was before."""
        for place, reached in enumerate(self._reached):
            if reached > PAST_WEIGHT:
                self._accepted[place] *= PAST_WEIGHT / reached
                self._reached[place] = PAST_WEIGHT

    @property
    def coverage(self) -> float:
        return max(_LEAST_COVERAGE, self._answered / self._asked)

    def gain(self, num: int) -> float:
        """Drafts accepted of `num`, on the average."""
        total, chance = 0.0, 1.0
        for place in range(num):
            chance *= self._accepted[place] / self._reached[place]
            total += chance
        return total


class TreeAcceptance:
    """What was accepted of trees lately, by how many of their nodes had been there; of at most this `shape`.

    The nodes of a tree are in the order of their likelihood, so a smaller tree is the beginning of a larger
    one: one verification tells of all sizes up to its own.
    """

    def __init__(self, shape: Shape) -> None:
        chances = FIRST_GUESS ** np.arange(1, shape.depth + 1)
        known = np.concatenate((chances, np.zeros(max(0, shape.nodes - shape.depth))))[: shape.nodes]
        self._verified = np.full(shape.nodes, PRIOR_WEIGHT)
        self._accepted = PRIOR_WEIGHT * known.cumsum()

    def record(self, num_nodes: int, path: Rows[int]) -> None:
        """A tree of so many nodes was verified, and those in these places were accepted."""
        sizes = slice(num_nodes)
        accepted = np.searchsorted(path, np.arange(1, num_nodes + 1))  # those before the tree's end
        self._verified[sizes] = KEPT * self._verified[sizes] + 1.0
        self._accepted[sizes] = KEPT * self._accepted[sizes] + accepted

    def loosen(self) -> None:
        """What comes next shall count, whatever was before."""
        much = self._verified > PAST_WEIGHT
        self._accepted[much] *= PAST_WEIGHT / self._verified[much]
        self._verified[much] = PAST_WEIGHT

    def gain(self, num_nodes: int) -> float:
        """Drafts accepted of a tree of so many, on the average."""
        return float(self._accepted[num_nodes - 1] / self._verified[num_nodes - 1])
