"""The seam behind which drafters stand: what the engine asks of one, whatever it is.

Invariant: a drafter may propose anything; it is never trusted, only verified.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol, runtime_checkable

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.shape import Shape


class Drafter(Protocol):
    """Guesses the next tokens of sequences. It lives on rank 0 alone.

    What it keeps of a sequence goes into `memory_of(sequence).own`, and so ends with the sequence.
    """

    @property
    def name(self) -> str:
        """In /metrics, in /server_info and in the log."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose captured states it needs; with none, it is not told of steps."""
        ...

    @property
    def is_model(self) -> bool:
        """Whether it has weights, and so is tried at the start."""
        ...

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """A step of these sequences has run, and its states are there; its tokens are not yet chosen."""
        ...

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        """At most `num` drafts for each sequence, whose next step makes a token; none where it knows none.

        A draft is the guess of the token after `sequence.tokens` and the drafts before it.
        """
        ...


Tree = tuple[
    list[int], list[int]
]  # drafts and their parents, the likeliest first: see `engine.speculation.tree`


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that can also guess several tokens for a place."""

    def propose_trees(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        """A tree of at most this shape for each sequence; an empty one where it knows nothing."""
        ...

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """Drafts of a tree were accepted, and now lie in the slots of their positions."""
        ...
