"""The target on several ranks in one process, to see what each of them captures.

The ranks are threads with their own shares of the weights. Invariant: every rank runs the same plan.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from firstlight.base.config import EngineSection
from firstlight.drafter.target import Target
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.startup import Started, quiet, start
from firstlight.ops.thread_group import Meeting, ThreadGroup


def states_of_ranks(
    target: Target, num_ranks: int, layers: tuple[int, ...], tokens: list[int], cpu_kernels: str
) -> list[torch.Tensor]:
    """The states [T, C, H] that each rank captures of one document."""
    meeting = Meeting(num_ranks)
    section = EngineSection(
        threads=1,
        tensor_parallel=num_ranks,
        cpu_kernels=cpu_kernels,
        max_num_seqs=1,
        max_model_len=len(tokens) + 1,
        max_batched_tokens=len(tokens),
        kv_memory_bytes=2**27,
        prefix_cache=False,
    )

    def one(rank: int) -> torch.Tensor:
        started: Started = start(
            target.checkpoint, "auto", section, ThreadGroup(rank, meeting), quiet, layers
        )
        num_pages = -(-len(tokens) // started.section.page_size_tokens)
        pages = [(0, 0, list(range(1, num_pages + 1)))]
        started.runner.run(StepPlan(0, [0], [0], [len(tokens)], tokens, [], pages))
        return started.runner.states.clone()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))
