"""How far two rows of numbers agree: keys that a page still has, drafts that were right.

Invariant: what follows the first difference does not count, be it alike again or not.
"""

from __future__ import annotations

from collections.abc import Iterable


def common_prefix(one: Iterable[int], other: Iterable[int]) -> int:
    """How many both begin with; one may be longer than the other."""
    num = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        num += 1
    return num
