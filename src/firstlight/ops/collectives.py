"""Collectives between ranks: each has a name, a sequence number and a deadline.

Layers call a `Group`; a single rank gets no-ops. Backed by torch.distributed (gloo on CPU, NCCL on CUDA).
Invariant: all ranks call the same collectives in the same order, because all run the same step plan; when one
does not arrive within the deadline, the error names the collective, its number and this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from firstlight.base.errors import EngineError

CPU = torch.device("cpu")


class Group:
    """The ranks of one model. `entered` and `left`: name and number of the last collective."""

    def __init__(
        self, rank: int = 0, size: int = 1, deadline_s: float = 60.0, device: torch.device = CPU
    ) -> None:
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self._device = device  # where the backend wants its tensors
        self.entered: tuple[str, int] = ("", 0)
        self.left: tuple[str, int] = ("", 0)

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place; returns the tensor."""
        if self.size > 1:
            self._run(name, lambda: dist.all_reduce(tensor))
        return tensor

    def gather_columns(self, name: str, tensor_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Joins the ranks' columns [R, C_rank] in rank order to [R, sum(widths)], on every rank."""
        if self.size == 1:
            return tensor_RC
        # The backends want equal shapes; shares may differ by a unit.
        widest = max(widths)
        mine = torch.nn.functional.pad(tensor_RC, (0, widest - tensor_RC.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        self._run(name, lambda: dist.all_gather(parts, mine))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def agree_on_least(self, name: str, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._run(name, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN))
        return int(tensor)

    def _run(self, name: str, call: Callable[[], object]) -> None:
        number = self.entered[1] + 1
        self.entered = (name, number)
        try:
            call()
        except RuntimeError as error:
            raise EngineError(
                f"rank {self.rank}: collective {name!r} number {number} did not complete within "
                f"{self.deadline_s:.0f} s: {str(error).splitlines()[0]}",
                "Another rank died or stopped; look at its log in the run directory.",
            ) from error
        self.left = (name, number)


def join(rank: int, size: int, rendezvous: Path, device: str, deadline_s: float) -> Group:
    """Joins the ranks of a run through a file in its private directory; every rank calls it once."""
    if size == 1:
        return Group(rank, size, deadline_s)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_s),
        )
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank}: not all {size} ranks arrived within {deadline_s:.0f} s: "
            f"{str(error).splitlines()[0]}",
            "Look at the logs of the other ranks in the run directory.",
        ) from error
    return Group(rank, size, deadline_s, torch.device("cuda", rank) if device == "cuda" else CPU)


def leave() -> None:
    """Leaves the group at the end of a rank; a no-op for a single rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
