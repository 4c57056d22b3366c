"""What carries collectives between ranks: the contract that `collectives.Group` calls.

`collectives_shared` carries them through memory of one machine, `collectives_torch` through gloo or NCCL.
Invariant: every rank of a group has the same kind, and gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Call:
    """One collective: its name, this rank's number of it, and the seconds it may take."""

    name: str
    number: int
    deadline_s: float


class CollectiveError(Exception):
    """Why a collective did not come about, as what is said of it: "was broken off: ..."."""


class Transport(Protocol):
    """The ranks of one model; a collective that does not come about raises `CollectiveError`."""

    @property
    def words(self) -> str:
        """What it is, and why, for the start-up report."""
        ...

    def sum(self, call: Call, whole: torch.Tensor) -> None:
        """Replaces a float32 tensor without gaps by the ranks' sum."""
        ...

    def join_columns(self, call: Call, mine_RC: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """All ranks' float32 columns [R, widths[rank]], in rank order [R, sum(widths)]."""
        ...

    def least(self, call: Call, value: int) -> int:
        """The smallest of the ranks' values."""
        ...

    def leave(self) -> None:
        """Ends it on this rank."""
        ...
