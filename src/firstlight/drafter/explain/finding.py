"""What a check says, and the order in which findings count.

Invariant: a finding names its side, its evidence as numbers, and the next step.
"""

from __future__ import annotations

import enum

import msgspec


class Side(enum.Enum):
    """Who has to act. The exit codes stand in docs/drafter.md."""

    FINE = "fine"
    TRAINING = "training"
    DATA = "data"
    TEMPLATE = "template"
    INTEGRATION = "integration"
    NOT_MEASURED = "not measured"


EXIT_CODES = {
    Side.FINE: 0,
    Side.TRAINING: 20,
    Side.DATA: 21,
    Side.TEMPLATE: 22,
    Side.INTEGRATION: 23,
    Side.NOT_MEASURED: 24,
}


class Sure(enum.IntEnum):
    """How much a finding tells."""

    HINT = 1  # worth knowing, decides nothing
    LIKELY = 2  # decides where nothing is proved
    PROVED = 3  # measured directly


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `place`: where it stands on the way from the data to the served draft.

    What stands earlier on that way may be the cause of what stands later, so it counts first.
    """

    cause: str
    side: Side
    sure: Sure
    place: int
    said: str
    evidence: list[str]
    next_step: str


class Place(enum.IntEnum):
    """The way from the data to the served draft."""

    CHECKPOINT = 0
    TARGET = 1
    TEMPLATE = 2
    DATA = 3
    CAPTURE = 4
    DECODE = 5
    WEIGHTS = 6
    CONFIG = 7
    DRAFTS = 8
    TRAINING = 9
    SERVED = 10
