"""Evidence and cases: everything one examination learnt, with typed look-ups.

A bundle is a `Case` as JSON. All that moves is looked at twice (`look` 0 and 1), at least two seconds apart.
Invariant: a case that was written and read again is equal to itself, so a verdict can be replayed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from firstlight.doctor.case.target import HOST, RUN, Target
from firstlight.doctor.case.values import Failed, Value, kind_of

MAX_RAW_CHARS = 2000
V = TypeVar("V", bound=Value)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was seen. `subject` is a process key, "host" or "run"; `time_s` is since 1970."""

    id: str
    source: str
    time_s: float
    look: int
    subject: str
    value: Value
    raw: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a collector hands over: evidence that has no number yet."""

    subject: str
    source: str
    value: Value
    raw: str = ""


@dataclass(frozen=True)
class Seen(Generic[V]):
    """Evidence whose kind is known."""

    evidence: Evidence
    value: V

    @property
    def id(self) -> str:
        return self.evidence.id

    @property
    def subject(self) -> str:
        return self.evidence.subject

    @property
    def time_s(self) -> float:
        return self.evidence.time_s


@dataclass(frozen=True)
class Pair(Generic[V]):
    """The same thing in both looks."""

    first: Seen[V]
    second: Seen[V]

    @property
    def seconds(self) -> float:
        """Between the looks; never zero."""
        return max(self.second.time_s - self.first.time_s, 1e-3)

    @property
    def ids(self) -> tuple[str, str]:
        return self.first.id, self.second.id


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One examination of one target."""

    target: Target
    evidence: tuple[Evidence, ...] = ()
    made_wall_s: float = 0.0
    made_by: str = ""  # version of firstlight
    host: dict[str, str] = {}

    def all(self, kind: type[V], *, subject: str | None = None, look: int | None = None) -> list[Seen[V]]:
        """Every piece of evidence of this kind, in the order it was numbered."""
        return [
            Seen(evidence, value)
            for evidence in self.evidence
            if isinstance(value := evidence.value, kind)
            and subject in (None, evidence.subject)
            and look in (None, evidence.look)
        ]

    def seen(self, kind: type[V], subject: str, look: int | None = None) -> Seen[V] | None:
        """The latest of this kind about a subject, or that of one look."""
        found = self.all(kind, subject=subject, look=look)
        return max(found, key=lambda item: item.evidence.look, default=None)

    def of(self, kind: type[V], subject: str, look: int | None = None) -> V | None:
        """The value of `seen`."""
        found = self.seen(kind, subject, look)
        return found.value if found else None

    def pair(self, kind: type[V], subject: str) -> Pair[V] | None:
        """Both looks at a subject, if there were two."""
        first, second = self.seen(kind, subject, 0), self.seen(kind, subject, 1)
        return Pair(first, second) if first and second else None

    def failures(self, collector: str | None = None, subject: str | None = None) -> list[Seen[Failed]]:
        """What was tried and not learnt."""
        return [
            item for item in self.all(Failed, subject=subject) if collector in (None, item.value.collector)
        ]

    def by_id(self, evidence_id: str) -> Evidence | None:
        """The evidence that a verdict cites."""
        return next((evidence for evidence in self.evidence if evidence.id == evidence_id), None)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The keys of all processes that something is known of, also of those that were dead before."""
        known = dict.fromkeys(process.key for process in self.target.processes)
        known.update(dict.fromkeys(evidence.subject for evidence in self.evidence))
        return tuple(key for key in known if key not in (HOST, RUN))

    @property
    def last_look(self) -> int:
        return max((evidence.look for evidence in self.evidence), default=0)


def number(observed: Iterable[tuple[int, float, Observation]], first: int = 1) -> tuple[Evidence, ...]:
    """Evidence from (look, time, observation), numbered in that order: "E7 threads rank-0"."""
    return tuple(
        Evidence(
            id=f"E{index} {kind_of(item.value)} {item.subject}",
            source=item.source,
            time_s=time_s,
            look=look,
            subject=item.subject,
            value=item.value,
            raw=item.raw if len(item.raw) <= MAX_RAW_CHARS else f"{item.raw[:MAX_RAW_CHARS]}…",
        )
        for index, (look, time_s, item) in enumerate(observed, first)
    )
