"""What a hypothesis is: a card that says everything about a cause, and a judgement of one case.

docs/doctor.md is made of the cards. Invariant: a judgement cites evidence for all it claims; a hypothesis for
which nothing speaks is at most possible, and one with a veto is excluded, whatever else speaks for it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from firstlight.doctor.case.target import Engine

if TYPE_CHECKING:
    from firstlight.doctor.case.view import View


class Condition(enum.Enum):
    """What the server is, as the exit code of `firstlight doctor` tells it."""

    HEALTHY = "healthy"
    STARTING = "starting"
    SLOW = "slow"
    STUCK = "stuck"
    DEAD = "dead"
    UNCLEAR = "unclear"


class Grade(enum.Enum):
    """How sure: proved by an exit record, a dead holder, a failed probe; or only pointed at."""

    PROVED = "proved"
    SUPPORTED = "supported"
    SUSPECTED = "suspected"
    POSSIBLE = "possible"  # nothing speaks for it, and nothing excludes it


class Look(enum.Enum):
    """A thing to measure. A verdict says which of these it had to do without."""

    RANKS = "ranks"
    MOTION = "motion"
    BYTES = "bytes"
    STACKS = "stacks"
    COLLECTIVES = "collectives"
    EXITS = "exits"
    LOGS = "logs"
    LOCKS = "locks"
    FILES = "files"
    SOCKETS = "sockets"
    MEMORY = "memory"
    GPUS = "gpus"
    RAS = "ras"
    GENERATION = "generation"
    ENVIRONMENT = "environment"


class Weight(enum.IntEnum):
    """How much a clue tells. Our own judgement, used to rank; nobody has measured likelihood ratios here."""

    WEAK = 1
    SOME = 2
    STRONG = 4
    PROOF = 100


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that speaks for or against. Clues of one group tell the same: only the heaviest counts."""

    text: str
    evidence: tuple[str, ...]
    weight: Weight = Weight.SOME
    group: str = ""


class Remedies(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, as exact commands or options; `{name}` fields are filled from the judgement."""

    native: str
    vllm: str
    sglang: str

    def of(self, engine: Engine) -> str:
        """The one for this engine; of an engine that we do not know, the general one."""
        return {Engine.VLLM: self.vllm, Engine.SGLANG: self.sglang}.get(engine, self.native)


def same(text: str) -> Remedies:
    """One remedy for every engine."""
    return Remedies(native=text, vllm=text, sglang=text)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a cause that does not depend on the case.

    `depth`: 0 for causes at the root, 1 for what may be the consequence of another one, 2 for a mere symptom.
    `prior`: the place among causes that nothing speaks for, by how often silent starts of the public reports
    had it; they are no sample, so it orders and does not weigh. `is_recorded`: judged from recorded evidence
    only, as nobody here has such a device to try it on.
    """

    cause: str
    title: str
    condition: Condition
    signs: tuple[str, ...]
    vetoes: tuple[str, ...]
    next_test: str
    remedies: Remedies
    looks: tuple[Look, ...]
    depth: int = 0
    prior: int = 0
    is_recorded: bool = False
    for_idle_gpus: bool = True  # whether the server's GPUs would stand at 0 %


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a hypothesis says of a case. `summary` empty: the card's title.

    `vetoes` exclude it. `fills` are the fields of the remedy and the next test (pid, path, ...).
    """

    supports: tuple[Clue, ...] = ()
    contradicts: tuple[Clue, ...] = ()
    vetoes: tuple[Clue, ...] = ()
    subject: str | None = None
    summary: str = ""
    condition: Condition | None = None
    fills: dict[str, str] = {}

    @property
    def score(self) -> int:
        """The heaviest clue of each group for it, less those against it."""
        return _sum(self.supports) - _sum(self.contradicts)

    @property
    def grade(self) -> Grade:
        """From the clues."""
        if any(clue.weight is Weight.PROOF for clue in self.supports):
            return Grade.PROVED
        if self.score >= Weight.STRONG:
            return Grade.SUPPORTED
        return Grade.SUSPECTED if self.score >= Weight.SOME else Grade.POSSIBLE


@dataclass(frozen=True)
class Hypothesis:
    """A cause and its judge. None: the case is not of a kind in which it could be the cause at all."""

    card: Card
    judge: Callable[[View], Judgement | None]


def _sum(clues: tuple[Clue, ...]) -> int:
    heaviest: dict[str, int] = {}
    for clue in clues:
        group = clue.group or clue.text
        heaviest[group] = max(heaviest.get(group, 0), clue.weight)
    return sum(heaviest.values())
