"""Finds where an answer begins to repeat itself: small models that decode greedily often end in a loop.

A loop is easy to draft, so it would flatter a drafter and teach it little. Invariant: an answer in which no
run of `RUN` tokens comes back three times is left whole.
"""

from __future__ import annotations

from collections.abc import Sequence

RUN = 8
TIMES = 3


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where the second round of a loop begins, so that what stands before is no loop; None without one."""
    seen: dict[tuple[int, ...], list[int]] = {}
    for end in range(RUN, len(tokens) + 1):
        places = seen.setdefault(tuple(tokens[end - RUN : end]), [])
        places.append(end - RUN)
        if len(places) == TIMES:
            return max(places[1], places[0] + RUN)
    return None
