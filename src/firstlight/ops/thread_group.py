"""Ranks as threads of one process, whose collectives go through memory.

Used where several ranks are looked at together: `drafter explain`, and tests. Invariant: sums are made in the
order of the ranks, and a rank that does not come is an error of all after the deadline.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from firstlight.ops.collectives import Group

DEADLINE_S = 600.0


class Meeting:
    """Where the ranks lay down what they have."""

    def __init__(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        self.barrier = threading.Barrier(size, timeout=deadline_s)
        self.values: list[Any] = [None] * size


class ThreadGroup(Group):
    """One rank of a meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.values))
        self._meeting = meeting

    def _exchange(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum, in float32."""
        first, *others = self._exchange(tensor.float().clone())
        return sum(others, start=first)

    def gather_columns(self, name: str, tensor_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """All columns on every rank."""
        return torch.cat(self._exchange(tensor_RC.clone()), 1)

    def agree_on_least(self, name: str, value: int) -> int:
        """The smallest value."""
        return int(min(self._exchange(value)))
