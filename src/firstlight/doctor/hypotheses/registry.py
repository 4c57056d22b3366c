"""All hypotheses, the order being that of preference between equals: roots before consequences.

Invariant: a cause is listed once.
"""

from __future__ import annotations

from firstlight.doctor.hypotheses import (
    bootstrap,
    collectives,
    compiling,
    deaths,
    devices,
    drafter,
    gpu_memory,
    gpu_paths,
    gpu_rendezvous,
    graphs,
    kernel_code,
    kernels,
    limits,
    locks,
    memory,
    pressure,
    reading,
    serving,
    storage,
    stragglers,
)
from firstlight.doctor.hypothesis import Hypothesis

HYPOTHESES: tuple[Hypothesis, ...] = (
    *deaths.HYPOTHESES,
    *memory.HYPOTHESES,
    *limits.HYPOTHESES,
    *gpu_memory.HYPOTHESES,
    *kernel_code.HYPOTHESES,
    *drafter.HYPOTHESES,
    *devices.HYPOTHESES,
    *gpu_rendezvous.HYPOTHESES,
    *locks.HYPOTHESES,
    *compiling.HYPOTHESES,
    *pressure.HYPOTHESES,
    *storage.HYPOTHESES,
    *reading.HYPOTHESES,
    *stragglers.HYPOTHESES,
    *collectives.HYPOTHESES,
    *gpu_paths.HYPOTHESES,
    *bootstrap.HYPOTHESES,
    *graphs.HYPOTHESES,
    *kernels.HYPOTHESES,
    *serving.HYPOTHESES,
)
