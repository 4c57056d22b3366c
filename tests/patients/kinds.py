"""All kinds of patients by name, in the order of the confusion matrix.

Read by `one`, `run` and the short form. Invariant: names are unique.
"""

from __future__ import annotations

from patients import (
    kinds_collective,
    kinds_dead,
    kinds_drafter,
    kinds_healthy,
    kinds_limits,
    kinds_locks,
    kinds_network,
    kinds_stopped,
    kinds_weights,
)
from patients.patient import Kind

_ALL: tuple[Kind, ...] = (
    *kinds_stopped.KINDS,
    *kinds_dead.KINDS,
    *kinds_collective.KINDS,
    *kinds_locks.KINDS,
    *kinds_network.KINDS,
    *kinds_limits.KINDS,
    *kinds_weights.KINDS,
    *kinds_drafter.KINDS,
    *kinds_healthy.KINDS,
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
assert len(KINDS) == len(_ALL), "two kinds have one name"
