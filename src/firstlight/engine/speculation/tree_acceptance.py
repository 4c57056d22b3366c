"""What was accepted of trees lately, by how many of their nodes had been there.

Used by `policy`. The nodes of a tree are in the order of their likelihood, so a smaller tree is the beginning
of a larger one: one verification tells of all sizes up to its own. Invariant: the more nodes, the more are
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from firstlight.engine.speculation.acceptance import FIRST_GUESS, KEPT, PAST_WEIGHT, PRIOR_WEIGHT
from firstlight.engine.speculation.shape import Shape


class TreeAcceptance:
    """Of trees of at most this `shape`."""

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
