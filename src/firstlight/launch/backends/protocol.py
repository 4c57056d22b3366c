"""What the supervisor needs of an engine, whoever wrote it: how to start it, and how to follow it.

Invariant: whatever runs the model, the same black boxes say where its processes are, so that whoever reads
phases need not ask which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from firstlight.base.blackbox.reader import Box
from firstlight.base.config import ModelSection, RunConfig
from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.doctor.case.target import Target
from firstlight.doctor.motion.states import Thresholds
from firstlight.launch.processes.commands import ChildSpec
from firstlight.launch.processes.output import OutputLine
from firstlight.launch.timeline.progress import ProgressLine


class BoxSpec(msgspec.Struct, frozen=True):
    """A black box to make before the first child starts."""

    name: str
    role: str
    rank: int | None = None


class Plan(msgspec.Struct, frozen=True):
    """What one start consists of."""

    children: tuple[ChildSpec, ...]
    boxes: tuple[BoxSpec, ...]


class Lost(msgspec.Struct, frozen=True):
    """A process that the engine cannot do without and that is no child of ours has ended."""

    name: str
    pid: int
    cause: ExitCause


class Follower(Protocol):
    """Follows one start of an engine. Only `output`, `target` and `thresholds` are for other threads too."""

    def started(self, name: str, pid: int) -> None:
        """A child has its process."""
        ...

    def output(self, name: str, line: OutputLine) -> None:
        """A child has printed a line. From any thread."""
        ...

    def read(self, now_s: float) -> list[ProgressLine]:
        """What has moved since the last call."""
        ...

    def can_answer(self, lines: Sequence[ProgressLine]) -> bool:
        """Whether it is time to ask for the first token; `lines` are those just read."""
        ...

    def answered(self) -> None:
        """The first token was generated through the whole path."""
        ...

    def ended(self, name: str) -> None:
        """A child has ended: what it left running is ended too."""
        ...

    def lost(self, now_s: float) -> Sequence[Lost]:
        """Who has ended, while the engine's first process goes on without him. Each is told once."""
        ...

    def last_words(self, name: str) -> Failure | None:
        """Why a child that has ended did so, by its own words."""
        ...

    def target(self) -> Target:
        """The processes as the doctor sees them, called by the names of their boxes."""
        ...

    def thresholds(self, boxes: Mapping[str, Box]) -> Thresholds:
        """When a process that computes without getting anywhere is called spinning."""
        ...


class Backend(Protocol):
    """One kind of engine, for one `firstlight serve`.

    `reads_model`: `require_servable` reads the model's files and keeps nothing, so that a child may do it.
    """

    reads_model: bool

    def find_model(self, asked: str | None, locate: Callable[[str | None], Path]) -> ModelSection:
        """The model section with its path and names."""
        ...

    def require_servable(self, model: ModelSection) -> None:
        """Says what cannot be served before any process is started for it."""
        ...

    def describe(self) -> str:
        """What runs the model, for the first line of a start; empty: the device says it."""
        ...

    def plan(self, config: RunConfig, listener_fd: int, control_fd: int) -> Plan:
        """What to start."""
        ...

    def follow(self, config: RunConfig) -> Follower:
        """The follower of a start whose boxes are made."""
        ...
