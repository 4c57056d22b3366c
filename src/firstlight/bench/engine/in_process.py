"""The engine in this process, as the benchmarks of its inside need it: no sockets, no text, plans by hand.

Invariant: it is started by `engine.worker.startup` like any other engine, so what is measured is what is
served.
"""

from __future__ import annotations

from pathlib import Path

import torch

from firstlight.base.config import EngineSection
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.startup import Started, quiet, start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.ops.collectives import Group


def open_engine(model: Path, dtype: str, section: EngineSection) -> Started:
    """A single rank that is ready to run plans."""
    return start(open_checkpoint(model), dtype, section, Group(), quiet)


def logits_of(engine: Started, tokens: list[int], rows_per_step: int) -> torch.Tensor:
    """Logits at every position, float32 [T, V], computed `rows_per_step` positions at a time.

    One entry a token, all in the same slot, since a step gives the logits of each entry's last token.
    Uses the first pages of the pool; nothing else may run meanwhile.
    """
    parts = []
    page_size = engine.section.page_size_tokens
    pages = list(range(1, -(-len(tokens) // page_size) + 1))
    for start_at in range(0, len(tokens), rows_per_step):
        chunk = tokens[start_at : start_at + rows_per_step]
        count = len(chunk)
        positions = list(range(start_at, start_at + count))
        plan = StepPlan(0, [0] * count, positions, [1] * count, chunk, list(range(count)), [(0, 0, pages)])
        parts.append(engine.runner.run(plan).clone())  # a replay may overwrite its result
    return torch.cat(parts)
