"""What `firstlight doctor` leaves with, so that a script can act on it.

Invariant: 0 means healthy and nothing else does; 1 to 6 are kept for errors of the doctor itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.doctor.hypothesis import Condition

EXIT_CODES = {
    Condition.HEALTHY: 0,
    Condition.STARTING: 10,
    Condition.SLOW: 11,
    Condition.STUCK: 12,
    Condition.DEAD: 13,
    Condition.UNCLEAR: 14,
}
MEANINGS = {
    Condition.HEALTHY: "it serves, or could: nothing is asked of it",
    Condition.STARTING: "it is on its way, and moves",
    Condition.SLOW: "it moves, but far slower than it should",
    Condition.STUCK: "nothing useful moves, and nothing will without help",
    Condition.DEAD: "a process that it needs has ended",
    Condition.UNCLEAR: "what could be seen does not suffice",
}
_WORST_FIRST = (
    Condition.DEAD,
    Condition.STUCK,
    Condition.UNCLEAR,
    Condition.SLOW,
    Condition.STARTING,
    Condition.HEALTHY,
)


def worst(conditions: Iterable[Condition]) -> Condition:
    """The condition that decides when several servers were looked at."""
    return min(conditions, key=_WORST_FIRST.index)
