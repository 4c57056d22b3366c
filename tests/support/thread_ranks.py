"""Ranks as threads of one process, with collectives over memory: several ranks without processes.

Used by the tests of recorded steps and of experts. Invariant: sums are made in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from firstlight.base.config import EngineSection
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.startup import Started, start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.ops.thread_group import Meeting, ThreadGroup

DEADLINE_S = 60.0


class ThreadRanks:
    """The ranks of one model, which run plans together. `capture`: layers whose states every rank keeps."""

    def __init__(
        self, path: Path, num_ranks: int, dtype: str = "auto", capture: Sequence[int] = (), **section: Any
    ) -> None:
        meeting = Meeting(num_ranks, DEADLINE_S)
        self._pool = ThreadPoolExecutor(num_ranks)
        sizes = {"threads": 1, "kv_memory_bytes": 2**25, "tensor_parallel": num_ranks, **section}

        def one(rank: int) -> Started:
            group = ThreadGroup(rank, meeting)
            checkpoint, section = open_checkpoint(path), EngineSection(**sizes)
            return start(checkpoint, dtype, section, group, lambda *_, **__: None, capture)

        self.started = list(self._pool.map(one, range(num_ranks)))

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits of rank 0; all ranks have the same."""
        all_logits = list(self._pool.map(lambda rank: rank.runner.run(plan).clone(), self.started))
        assert all(logits.equal(all_logits[0]) for logits in all_logits)
        return all_logits[0]
