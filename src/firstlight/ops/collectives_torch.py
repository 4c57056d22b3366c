"""Collectives over torch.distributed: gloo between CPUs, NCCL between GPUs.

Opened by `collectives.join`. Invariant: one process has one such group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from firstlight.base.errors import EngineError
from firstlight.ops.rendezvous import Rendezvous
from firstlight.ops.transport import Call, CollectiveError

_LATE_SHARE = 0.9  # of the deadline: what fails earlier did not fail by it


class TorchTransport:
    """See `transport.Transport`. `device` is where the backend wants its tensors."""

    def __init__(self, words: str, device: torch.device) -> None:
        self.words = words
        self._device = device

    def sum(self, call: Call, whole: torch.Tensor) -> None:
        _run(call, lambda: dist.all_reduce(whole))

    def join_columns(self, call: Call, mine_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        # The backends want equal shapes; shares may differ by a unit.
        widest = max(widths)
        mine = torch.nn.functional.pad(mine_RC, (0, widest - mine_RC.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        _run(call, lambda: dist.all_gather(parts, mine))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def least(self, call: Call, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        _run(call, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN))
        return int(tensor)

    def leave(self) -> None:
        dist.destroy_process_group()


def open_torch(meeting: Rendezvous, backend: str, why: str, device: torch.device) -> TorchTransport:
    """Connects all ranks of a meeting. Raises `EngineError` where one cannot be reached."""
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", cast(Store, meeting.store)),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=meeting.deadline_s),
        )
    except RuntimeError as error:
        raise EngineError(
            f"rank {meeting.rank}: the {meeting.size} ranks did not connect within "
            f"{meeting.deadline_s:.0f} s: {str(error).splitlines()[0]}",
            "Look at the logs of the other ranks in the run directory.",
        ) from error
    return TorchTransport(f"{backend}{why and f': {why}'}", device)


def _run(call: Call, operation: Callable[[], object]) -> None:
    started_s = time.monotonic()
    try:
        operation()
    except RuntimeError as error:
        # torch's own text (a path of its build and a joke) goes to the log of a --debug run only.
        is_late = time.monotonic() - started_s >= _LATE_SHARE * call.deadline_s
        raise CollectiveError(
            f"did not complete within {call.deadline_s:.0f} s"
            if is_late
            else "was broken off: the connection to another rank ended"
        ) from error
