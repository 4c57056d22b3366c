"""How many drafts a sequence gets, and how they stand to each other: a chain, or a tree.

Chosen by `policy`, made by drafters. Invariant: a chain is the shape with a `top_k` of 1, and has as many
nodes as it is deep.
"""

from __future__ import annotations

from typing import NamedTuple

from firstlight.base.config import EngineSection
from firstlight.base.draft_tree import MOST_NODES


class Shape(NamedTuple):
    """`depth` drafts one behind the other; the `top_k` likeliest in each place, of which as many go on, and
    of all these the `nodes` likeliest."""

    depth: int
    top_k: int
    nodes: int

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1

    @property
    def num_expanded(self) -> int:
        """Tokens that the drafter runs over to make it: the last known one, and drafts that go on."""
        return 1 + (self.depth - 1) * self.top_k

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.nodes} in a tree of {self.depth} x {self.top_k}" if self.is_tree else str(self.depth)


def chain(num: int) -> Shape:
    """So many drafts, each behind the one before it."""
    return Shape(num, 1, num)


NOTHING = chain(0)


def shape_of(section: EngineSection) -> Shape:
    """The largest that the settings allow."""
    depth, top_k = section.draft_tokens, section.draft_top_k
    if top_k == 1:
        return chain(depth)
    return Shape(depth, top_k, section.draft_nodes or min(depth * top_k, MOST_NODES))
