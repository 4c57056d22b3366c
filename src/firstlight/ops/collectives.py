"""Collectives between ranks: each has a name, a sequence number and a deadline.

Layers call a `Group`; a single rank gets no-ops. Backed by torch.distributed (gloo on CPU, NCCL on CUDA).
Invariant: all ranks call the same collectives in the same order, because all run the same step plan; when one
does not arrive within the deadline, the error names the collective, its number and this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.base.errors import EngineError
from firstlight.ops.step_clock import Kind, StepClock

CPU = torch.device("cpu")
ARRIVAL_LOOK_S = 0.01
_LATE_SHARE = 0.9  # of the deadline: what fails earlier did not fail by it


class Group:
    """The ranks of one model. Each collective is written to `recorder` as it is entered and left.

    `clock`: of this rank's steps.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        deadline_s: float = 60.0,
        device: torch.device = CPU,
        recorder: Recorder | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self.device = device  # where the backend wants its tensors
        self.recorder = recorder or NoBox()
        self.clock = StepClock()
        self._name_numbers: dict[str, int] = {}
        self.num_entered = 0

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks in float32; returns the sum.

        Each rank measures its own layouts, and may get bfloat16 from one where another gets float32; what
        they send must be the same on all of them.
        """
        if self.size == 1:
            return tensor
        whole = tensor.float()
        self._run(name, lambda: dist.all_reduce(whole))
        return whole

    def gather_columns(self, name: str, tensor_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Joins the ranks' columns [R, C_rank] in rank order to [R, sum(widths)], on every rank."""
        if self.size == 1:
            return tensor_RC
        # The backends want equal shapes; shares may differ by a unit.
        widest = max(widths)
        mine = torch.nn.functional.pad(tensor_RC.float(), (0, widest - tensor_RC.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        self._run(name, lambda: dist.all_gather(parts, mine))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def agree_on_least(self, name: str, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._run(name, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN))
        return int(tensor)

    def _run(self, name: str, call: Callable[[], object]) -> None:
        number = self.num_entered = self.num_entered + 1
        if name not in self._name_numbers:
            self._name_numbers[name] = self.recorder.name(name)
        self.recorder.enter_collective(self._name_numbers[name], number)
        started_s = time.monotonic()
        try:
            self.clock.run(Kind.COLLECTIVES, call)
        except RuntimeError as error:
            # torch's own text (a path of its build and a joke) goes to the log of a --debug run only.
            took_s = time.monotonic() - started_s
            is_late = took_s >= _LATE_SHARE * self.deadline_s
            how = (
                f"did not complete within {self.deadline_s:.0f} s"
                if is_late
                else "was broken off: the connection to another rank ended"
            )
            raise EngineError(
                f"rank {self.rank}: collective {name!r} number {number} {how}.",
                "Another rank died or stopped; look at its log in the run directory.",
            ) from error
        self.recorder.leave_collective(self._name_numbers[name], number)


def join(
    group: Group, rendezvous: Path, device: str, on_arrival: Callable[[int], None] = lambda _: None
) -> Group:
    """Joins the ranks of a run through a file in its private directory; every rank calls it once.

    `on_arrival` hears how many ranks have arrived whenever there are more. Raises `EngineError` that names
    the ranks which have not arrived within the deadline.
    """
    if group.size == 1:
        return group
    store = FileStore(str(rendezvous), group.size)
    _await_all(group, store, on_arrival)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=group.deadline_s),
        )
    except RuntimeError as error:
        raise EngineError(
            f"rank {group.rank}: the {group.size} ranks did not connect within {group.deadline_s:.0f} s: "
            f"{str(error).splitlines()[0]}",
            "Look at the logs of the other ranks in the run directory.",
        ) from error
    return group


def _await_all(group: Group, store: FileStore, on_arrival: Callable[[int], None]) -> None:
    """Count the ranks in, so that the ones which are missing can be named; torch would only time out."""
    store.set(f"rank-{group.rank}", "here")
    give_up_s = time.monotonic() + group.deadline_s
    num_arrived = 0
    while True:
        missing = [rank for rank in range(group.size) if not store.check([f"rank-{rank}"])]
        if group.size - len(missing) > num_arrived:
            num_arrived = group.size - len(missing)
            on_arrival(num_arrived)
        if not missing:
            return
        if time.monotonic() > give_up_s:
            raise EngineError(
                f"rank {group.rank}: {_ranks(missing)} did not arrive within {group.deadline_s:.0f} s.",
                "Look at their logs in the run directory; `firstlight doctor` says where they are.",
            )
        time.sleep(ARRIVAL_LOOK_S)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def leave() -> None:
    """Leaves the group at the end of a rank; a no-op for a single rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
