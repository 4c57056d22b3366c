"""All hypotheses, the order being that of preference between equals: roots before consequences.

Read by `verdict` and by the handbook. Invariant: a cause is listed once.
"""

from __future__ import annotations

from firstlight.doctor.hypotheses import (
    collectives,
    compiling,
    deaths,
    limits,
    locks,
    memory,
    pressure,
    reading,
    serving,
    stragglers,
)
from firstlight.doctor.hypothesis import Hypothesis

HYPOTHESES: tuple[Hypothesis, ...] = (
    *deaths.HYPOTHESES,
    *memory.HYPOTHESES,
    *limits.HYPOTHESES,
    *locks.HYPOTHESES,
    *compiling.HYPOTHESES,
    *pressure.HYPOTHESES,
    *reading.HYPOTHESES,
    *stragglers.HYPOTHESES,
    *collectives.HYPOTHESES,
    *serving.HYPOTHESES,
)
