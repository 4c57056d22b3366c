"""What `explain` is asked: whose drafter, which target, which data, and what a server reached.

Invariant: nothing here says what may be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from firstlight.drafter.explain.evidence import Served
from firstlight.drafter.prompt_files import Conversation
from firstlight.drafter.target import Target


@dataclass(frozen=True)
class Order:
    """`out` is a run folder, or None; then `prompts` are answered by the engine. `num_ranks` above 1: the
    states of so many ranks are compared."""

    target: Target
    drafter: Path
    out: Path | None = None
    prompts: tuple[Conversation, ...] = ()
    k: int = 3
    max_documents: int = 8
    max_tokens: int = 384  # of a document
    answer_tokens: int = 64  # made anew by the engine
    num_ranks: int = 1
    threads: int = 0
    cpu_kernels: str = "auto"
    served: Served | None = None
    notes: list[str] = field(default_factory=list)
