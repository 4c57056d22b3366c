"""Several processes that train one drafter: each takes its rows of a step, and the gradients are added up.

The first rank is the process that was started; it alone writes and speaks. Invariant: with one rank nothing
here is more than a look at `size`, and with several all of them do the same steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from firstlight.base.errors import EngineError

JOIN_S = 30.0


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size`."""

    rank: int = 0
    size: int = 1

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Leaves in every rank the sum of all ranks' gradients. Raises `EngineError` where one is gone."""
        if self.size == 1:
            return
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in learning:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in learning if parameter.grad is not None])
        self._reduce(flat)
        for parameter, part in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
            parameter.grad = part.view_as(parameter)

    def add_numbers(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks of numbers that each of them has."""
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=torch.float64)
        self._reduce(values)
        return values.tolist()

    def of_first(self, value: Any) -> Any:
        """What the first rank says."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _reduce(self, values: torch.Tensor) -> None:
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise EngineError(
                f"Another rank of the training is gone: {str(error).splitlines()[0]}",
                "Start the command again: it goes on from the last checkpoint; --ranks 1 needs no other.",
            ) from error


@contextmanager
def together(size: int, work: Callable[..., None], given: tuple[Any, ...]) -> Iterator[Ranks]:
    """Starts the other ranks, which call `work(ranks, *given)`, and is the first one itself."""
    if size == 1:
        yield Ranks()
        return
    threads = max(1, torch.get_num_threads() // size)
    with tempfile.TemporaryDirectory(prefix="firstlight-train-") as folder:
        meeting = Path(folder, "meeting").as_uri()
        spawn = multiprocessing.get_context("spawn")
        others = [
            spawn.Process(target=_other, args=(rank, size, threads, meeting, work, given), daemon=True)
            for rank in range(1, size)
        ]
        for process in others:
            process.start()
        torch.set_num_threads(threads)
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=size)
        try:
            yield Ranks(0, size)
            for process in others:
                process.join(JOIN_S)
        finally:
            dist.destroy_process_group()
            for process in others:
                process.kill()


def _other(
    rank: int, size: int, threads: int, meeting: str, work: Callable[..., None], given: tuple[Any, ...]
) -> None:
    # What goes wrong here the first rank notices, and says once.
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    work(Ranks(rank, size), *given)
    dist.destroy_process_group()
