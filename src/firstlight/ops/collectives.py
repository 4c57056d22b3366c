"""Collectives between ranks: each has a name, a sequence number and a deadline.

Layers call a `Group`; a single rank gets no-ops. They go through memory that the ranks of one machine share,
else through torch.distributed. Invariant: all ranks call the same collectives in the same order, because all
run the same step plan; when one does not arrive within the deadline, the error names the collective and its
number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch._C._distributed_c10d import FileStore

from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.base.errors import EngineError, ResourceError
from firstlight.ops.collectives_shared import open_shared
from firstlight.ops.collectives_torch import open_torch
from firstlight.ops.cpu.library import open_library
from firstlight.ops.rendezvous import Rendezvous
from firstlight.ops.step_clock import Kind, StepClock
from firstlight.ops.transport import Call, CollectiveError, Transport

CPU = torch.device("cpu")
T = TypeVar("T")


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
        self.transport: Transport | None = None  # several ranks have one once they have joined
        self._name_numbers: dict[str, int] = {}
        self.num_entered = 0

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks in float32; returns the sum, for which it may use the tensor's memory.

        Each rank measures its own layouts, and may get bfloat16 from one where another gets float32; what
        they send must be the same on all of them.
        """
        if self.size == 1:
            return tensor
        whole = tensor.float().contiguous()
        self._run(name, lambda transport, call: transport.sum(call, whole))
        return whole

    def gather_columns(self, name: str, tensor_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Joins the ranks' columns [R, C_rank] in rank order to [R, sum(widths)], on every rank."""
        if self.size == 1:
            return tensor_RC
        mine = tensor_RC.float().contiguous()
        return self._run(name, lambda transport, call: transport.join_columns(call, mine, widths))

    def agree_on_least(self, name: str, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        return self._run(name, lambda transport, call: transport.least(call, value))

    def leave(self) -> None:
        """Leaves the group at the end of a rank; a no-op for a single one."""
        if self.transport is not None:
            self.transport.leave()

    def _run(self, name: str, collective: Callable[[Transport, Call], T]) -> T:
        assert self.transport is not None, "a collective before the ranks have joined"
        number = self.num_entered = self.num_entered + 1
        if name not in self._name_numbers:
            self._name_numbers[name] = self.recorder.name(name)
        self.recorder.enter_collective(self._name_numbers[name], number)
        try:
            call = Call(name, number, self.deadline_s)
            result = self.clock.run(Kind.COLLECTIVES, collective, self.transport, call)
        except CollectiveError as error:
            raise EngineError(
                f"rank {self.rank}: collective {name!r} number {number} {error}.",
                "Another rank died or stopped; look at its log in the run directory.",
            ) from error
        self.recorder.leave_collective(self._name_numbers[name], number)
        return result


@dataclass(frozen=True)
class Wish:
    """How the ranks shall be joined, the same on all of them. `means`: the setting collectives.

    `library` gives the native one, which sharing memory takes, or raises `MissingLibraryError`.
    """

    device: str = "cpu"
    means: str = "auto"
    library: Callable[[], ctypes.CDLL] = open_library


def join(
    group: Group,
    rendezvous: Path,
    wish: Wish = Wish(),
    on_arrival: Callable[[int], None] = lambda _: None,
) -> Group:
    """Joins the ranks of a run through a file in its private directory; every rank calls it once.

    `on_arrival` hears how many ranks have arrived whenever there are more. Raises `EngineError` that names
    the ranks which have not arrived within the deadline, and `ResourceError` where memory must be shared and
    cannot be.
    """
    if group.size == 1:
        return group
    meeting = Rendezvous(FileStore(str(rendezvous), group.size), group.rank, group.size, group.deadline_s)
    meeting.say("rank", "here")
    meeting.hear("rank", range(group.size), "did not arrive", on_arrival)
    if wish.device == "cuda":
        group.transport = open_torch(meeting, "nccl", "", group.device)
    elif wish.means == "gloo":
        group.transport = open_torch(meeting, "gloo", "--collectives gloo", group.device)
    else:
        group.transport = _share_memory(meeting, wish)
    return group


def _share_memory(meeting: Rendezvous, wish: Wish) -> Transport:
    shared = open_shared(meeting, wish.library)
    if not isinstance(shared, str):
        return shared
    if wish.means == "shared-memory":
        raise ResourceError(f"the ranks cannot share memory: {shared}.", "Use --collectives auto, or gloo.")
    return open_torch(meeting, "gloo", f"memory is not shared, {shared}", CPU)
