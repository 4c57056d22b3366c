"""The run: round after round every engine is started, asked, measured and ended, and each figure is stored.

Called by `__main__`. Invariant: while one engine is measured, no other one runs: it is not there, or
stopped by a signal.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.base.errors import EngineError, FirstlightError
from peers.measures import BY_NAME, LAUNCH, MEMORY, QUESTIONS, WARM_UP, Measure, are_right, figure, num_right
from peers.results import ANSWER, LIMITS, Results, Sample, save
from peers.schedule import Schedule
from peers.settings import Setting
from peers.subjects import Subject, launch

LIMITS_S = 300.0
Say = Callable[[str], None]


class Run:
    """Carries out a schedule. Leaving the `with` block ends every engine."""

    def __init__(self, schedule: Schedule, results: Results, path: Path, say: Say) -> None:
        self._schedule, self._results, self._path, self._say = schedule, results, path, say
        self._staying: dict[str, Subject] = {}
        self._given_up: set[str] = set()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for subject in self._staying.values():
            subject.go_on()
            subject.close()

    def all_rounds(self) -> None:
        """What the results do not have yet."""
        for number in range(1, self._results.rounds + 1):
            going = [s for s in self._schedule.settings if s.name not in self._given_up]
            visits = [s for s in going if self._schedule.needs(self._results, s, number)]
            if not visits:
                continue
            self._limits(number)
            for setting in visits:
                self._visit(setting, number)

    def _limits(self, number: int) -> None:
        if self._results.value(number, LIMITS, "read_bytes_per_s") is not None:
            return
        start_s = time.monotonic()
        found = machine_limits(Path(self._results.model), self._results.threads)
        self._results.facts = found["facts"]
        for name, value in found["rates"].items():
            self._keep(Sample(round=number, setting=LIMITS, measure=name, value=value), start_s)
        read, multiply = (found["rates"].get(f"{n}_per_s", 0) for n in ("read_bytes", "int8_operations"))
        self._say(
            f"round {number}: the machine reads {read / 1e9:.1f} GB/s, multiplies {multiply / 1e9:.0f} G/s"
        )

    def _visit(self, setting: Setting, number: int) -> None:
        needs = self._schedule.needs(self._results, setting, number)
        if not needs:
            return
        left_min = self._schedule.remaining_s(self._results, number, setting) / 60
        self._say(f"round {number} of {self._results.rounds}, {setting.name} (about {left_min:.0f} min left)")
        start_s = time.monotonic()
        try:
            subject = self._open(setting, number, start_s)
        except (FirstlightError, OSError) as error:
            self._given_up.add(setting.name)
            self._failed(setting, number, LAUNCH, error, start_s)
            return
        try:
            self._measure_all(setting, number, subject, needs)
        finally:
            self._leave(setting, subject)

    def _open(self, setting: Setting, number: int, start_s: float) -> Subject:
        if setting.name in self._staying:
            subject = self._staying[setting.name]
            subject.go_on()
            return subject
        subject = launch(setting)
        try:
            first_s = subject.first_token_s()
        except BaseException:
            subject.close()
            raise
        self._keep(Sample(round=number, setting=setting.name, measure=LAUNCH, value=first_s), start_s)
        if setting.stays:
            self._staying[setting.name] = subject
        return subject

    def _leave(self, setting: Setting, subject: Subject) -> None:
        if setting.name in self._staying:
            subject.pause()
        else:
            subject.close()

    def _measure_all(self, setting: Setting, number: int, subject: Subject, needs: list[Measure]) -> None:
        start_s = time.monotonic()
        try:
            answers = [subject.answer(question) for question, _ in QUESTIONS]
            self._keep(Sample(round=number, setting=setting.name, measure=ANSWER, texts=answers), start_s)
            self._say(f"  {num_right(answers)} of {len(answers)} plain questions answered; {answers[0]!r}")
            if not are_right(answers):
                self._say(f"  WRONG, so not a valid setting: {answers}")
                return
            subject.load(WARM_UP, number)
        except (FirstlightError, OSError, ValueError) as error:
            self._failed(setting, number, ANSWER, error, start_s)
            return
        for measure in needs:
            if measure.name != LAUNCH:
                self._measure(setting, number, subject, measure)

    def _measure(self, setting: Setting, number: int, subject: Subject, measure: Measure) -> None:
        start_s = time.monotonic()
        try:
            value = _value(subject, measure, number)
        except (FirstlightError, OSError, ValueError) as error:
            self._failed(setting, number, measure.name, error, start_s)
            return
        self._keep(Sample(round=number, setting=setting.name, measure=measure.name, value=value), start_s)

    def _failed(self, setting: Setting, number: int, name: str, error: Exception, start_s: float) -> None:
        text = f"{type(error).__name__}: {error}"
        self._keep(Sample(round=number, setting=setting.name, measure=name, error=text), start_s)

    def _keep(self, sample: Sample, start_s: float) -> None:
        took_s = round(time.monotonic() - start_s, 2)
        self._results.add(msgspec.structs.replace(sample, took_s=took_s))
        save(self._path, self._results)
        if sample.error is not None:
            self._say(f"  {sample.measure}: FAILED: {sample.error}")
        elif (measure := BY_NAME.get(sample.measure)) is not None:
            self._say(f"  {measure.label}: {sample.value:,.1f} {measure.unit} ({took_s:.1f} s)")


def _value(subject: Subject, measure: Measure, round_number: int) -> float:
    if measure.name == MEMORY:
        return subject.pss_bytes() / 1e6
    return figure(measure, subject.load(measure, measure.seed(round_number)))


def machine_limits(gguf: Path, threads: int) -> dict[str, dict[str, float]]:
    """ "rates" and "facts" as `limits` finds them, in a process of its own."""
    command = [sys.executable, "-m", "peers.limits", str(gguf), str(threads)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=LIMITS_S)
    if done.returncode:
        raise EngineError(
            f"the machine's limits could not be measured: {done.stderr.decode()[-500:]}",
            "Run `python -m peers.limits` by itself.",
        )
    found: dict[str, dict[str, float]] = msgspec.json.decode(done.stdout)
    return found
