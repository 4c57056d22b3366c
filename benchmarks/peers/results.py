"""The results file: every measurement as it was made, stored after each, so that a run can go on later.

Used by `rounds`, `goals` and `page`. Invariant: the file is whole at every moment, and one file holds
figures of one machine, model and number of threads only.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import UsageError
from firstlight.bench.measures import median
from firstlight.bench.report import provenance
from peers.measures import are_right

ANSWER, LIMITS = "answer", "limits"  # a measure with texts, and a setting that is the machine itself


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement: a value, the answers to the plain questions, or why there is none."""

    round: int
    setting: str
    measure: str
    value: float | None = None
    texts: list[str] = []
    error: str | None = None
    took_s: float = 0.0
    time: str = ""


class Results(msgspec.Struct, kw_only=True):
    """One run. `quality` is the report of `bench quality`, `facts` what the model makes necessary."""

    rounds: int
    threads: int
    model: str
    provenance: dict[str, Any] = {}
    versions: dict[str, str] = {}
    facts: dict[str, float] = {}
    notes: dict[str, str] = {}
    quality: dict[str, Any] | None = None
    samples: list[Sample] = []

    @property
    def rounds_run(self) -> int:
        """The last round of which there is a figure."""
        return max((sample.round for sample in self.samples), default=0)

    def add(self, sample: Sample) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.samples.append(msgspec.structs.replace(sample, time=now))

    def values(self, setting: str, measure: str) -> list[float]:
        """In the order they were measured; an answer that was wrong makes no difference here."""
        return [s.value for s in self._of(setting, measure) if s.value is not None]

    def value(self, round_number: int, setting: str, measure: str) -> float | None:
        """Of one round."""
        found = (s.value for s in self._of(setting, measure) if s.round == round_number)
        return next((value for value in found if value is not None), None)

    def median(self, setting: str, measure: str) -> float | None:
        """Over the rounds."""
        values = self.values(setting, measure)
        return median(values) if values else None

    def answers(self, setting: str) -> list[list[str]]:
        """What it said to the plain questions, in each visit."""
        return [s.texts for s in self._of(setting, ANSWER) if s.texts]

    def is_valid(self, setting: str) -> bool:
        """Whether it has answered, and rightly each time."""
        answers = self.answers(setting)
        return bool(answers) and all(map(are_right, answers))

    def is_wrong(self, setting: str) -> bool:
        """Whether it has given a wrong answer."""
        return not all(map(are_right, self.answers(setting)))

    def errors(self) -> list[Sample]:
        """What could not be measured, unless it could later."""
        return [
            s
            for s in self.samples
            if s.error is not None and self.value(s.round, s.setting, s.measure) is None
        ]

    def _of(self, setting: str, measure: str) -> Iterator[Sample]:
        return (s for s in self.samples if s.setting == setting and s.measure == measure)


def start_or_resume(path: Path, *, rounds: int, threads: int, model: str, fresh: bool) -> Results:
    """The run in the file with so many rounds now, or a new one. Raises `UsageError` for another's."""
    now = provenance()
    if fresh or not path.exists():
        return Results(rounds=rounds, threads=threads, model=model, provenance=now)
    results = load(path)
    here = (now["processor"], threads, model)
    if (results.provenance.get("processor"), results.threads, results.model) != here:
        raise UsageError(
            f"{path} holds a run of another machine, model or number of threads.",
            "Begin anew with --fresh, or give another --output.",
        )
    results.rounds = rounds
    return results


def load(path: Path) -> Results:
    """Raises `UsageError` where there are no results."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"no results in {path}: {error}", "Run `make bench-peers` first.") from error


def save(path: Path, results: Results) -> None:
    """A sample a line, so that a difference between two files can be read."""
    head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(results, samples=[])), indent=2)
    lines = b",\n    ".join(map(msgspec.json.encode, results.samples))
    whole = head.replace(b'"samples": []', b'"samples": [\n    ' + lines + b"\n  ]") if lines else head
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(whole + b"\n")
    os.replace(unfinished, path)
