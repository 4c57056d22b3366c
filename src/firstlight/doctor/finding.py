"""Findings and verdicts: what is said of a case, as values.

Invariant: nothing here decides; a finding cites its evidence, for and against.
"""

from __future__ import annotations

import msgspec

from firstlight.doctor.hypothesis import (
    Clue,
    Condition,
    Grade,
    Look,
    Remedies,
    same,
)

_NOTHING = same("nothing.")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause with all that is known about it in this case."""

    cause: str
    grade: Grade
    condition: Condition
    subject: str | None
    summary: str
    supports: tuple[Clue, ...] = msgspec.field(name="for", default=())
    contradicts: tuple[Clue, ...] = msgspec.field(name="against", default=())
    not_measured: tuple[Look, ...] = ()
    next_test: str = ""
    remedies: Remedies = _NOTHING
    is_recorded: bool = False


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that something contradicts."""

    cause: str
    because: tuple[Clue, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `others`: further causes in order; `decisive`: the looks that would decide, best first."""

    condition: Condition
    cause: str
    grade: Grade
    subject: str | None
    summary: str
    supports: tuple[Clue, ...] = msgspec.field(name="for", default=())
    contradicts: tuple[Clue, ...] = msgspec.field(name="against", default=())
    not_measured: tuple[Look, ...] = ()
    next_test: str = ""
    remedies: Remedies = _NOTHING
    remedy: str = ""  # the one for this engine
    others: tuple[Finding, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    decisive: tuple[Look, ...] = ()
    cautions: tuple[str, ...] = ()
