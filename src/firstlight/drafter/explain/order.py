"""What `explain` is asked: whose drafter, which target, which data, and what a server reached.

Made by the command, read by `collect`. Invariant: nothing here says what may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.drafter.explain.evidence import Served
from firstlight.drafter.target import Target
from firstlight.engine.core import EngineCore
from firstlight.engine.startup import Started


@dataclass(frozen=True)
class Drafting:
    """An engine that drafts: started with the drafter, whose `layers` its steps capture."""

    started: Started
    core: EngineCore
    layers: tuple[int, ...]


StartDrafting = Callable[["Order"], Drafting]


@dataclass(frozen=True)
class Order:
    """`out` is a run folder, or None; then `prompts` are answered by the engine. `num_ranks` above 1: the
    states of so many ranks are compared. `start_drafting`: how the engine is started with the drafter."""

    target: Target
    drafter: Path
    out: Path | None = None
    prompts: tuple[str, ...] = ()
    k: int = 3
    max_documents: int = 8
    max_tokens: int = 384  # of a document
    answer_tokens: int = 64  # made anew by the engine
    num_ranks: int = 1
    threads: int = 0
    cpu_kernels: str = "auto"
    served: Served | None = None
    start_drafting: StartDrafting | None = None
    notes: list[str] = field(default_factory=list)
