"""`firstlight doctor --watch`: examines again and again, and says when a verdict changes.

Invariants: a server that is gone gets its last verdict, once; the exit code is that of the latest verdicts.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from firstlight.base.errors import UsageError
from firstlight.cli.doctor_output import Examined, as_json, judged
from firstlight.cli.doctor_targets import examine_one, targets_of
from firstlight.doctor.case.target import Target
from firstlight.doctor.hypothesis import Condition
from firstlight.doctor.report.exit_codes import EXIT_CODES, worst
from firstlight.doctor.report.report_text import headline, name_of, printable

if TYPE_CHECKING:
    from firstlight.cli.doctor_options import DoctorOptions

_PAUSE_S = 2.0
_WIPE = "\r\x1b[K"


class _State(NamedTuple):
    """What makes two verdicts different ones."""

    condition: Condition
    cause: str
    subject: str | None


class _Known(NamedTuple):
    """A server that is watched."""

    target: Target
    state: _State | None = None
    is_gone: bool = False


class _Interrupt:
    """Remembers a Ctrl-C: one that arrives in a destructor is reported there, and raised to nobody."""

    has_come = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, *_: object) -> None:
        self.has_come = True
        raise KeyboardInterrupt


def watch(options: DoctorOptions) -> int:
    """Until Ctrl-C; the exit code of the last verdicts."""
    known: dict[str, _Known] = {}
    with _Interrupt() as interrupt, contextlib.suppress(KeyboardInterrupt):
        while not interrupt.has_come:
            _round(options, known)
            time.sleep(_PAUSE_S)
    if sys.stderr.isatty():
        print(_WIPE, end="", file=sys.stderr, flush=True)
    states = [one.state.condition for one in known.values() if one.state is not None]
    return EXIT_CODES[worst(states)] if states else EXIT_CODES[Condition.UNCLEAR]


def _round(options: DoctorOptions, known: dict[str, _Known]) -> None:
    """One examination of each server that is known or found now."""
    found = {_identity(target): target for target in _targets(options, known)}
    for name, target in found.items():
        old = known.get(name)
        known[name] = _Known(target, old.state if old else None)
    for name, one in list(known.items()):
        if one.is_gone:
            continue
        seen = judged(examine_one(one.target, options))
        verdict = seen.verdict
        state = _State(verdict.condition, verdict.cause, verdict.subject)
        if state != one.state:
            _say(seen, options)
        known[name] = _Known(one.target, state, name not in found)
        _beat(f"{printable(name_of(one.target))}: {verdict.condition.value}, {verdict.cause}")


def _targets(options: DoctorOptions, known: dict[str, _Known]) -> tuple[Target, ...]:
    """Who is there now. Who was pointed at stays the one that was found first, even when it has ended."""
    try:
        return targets_of(options)
    except UsageError:
        if not known:
            raise
        return ()


def _identity(target: Target) -> str:
    """What stays the same while a server lives, whichever processes come and go."""
    if target.run_dir is not None:
        return target.run_dir
    oldest = min(target.processes, key=lambda one: (one.start_ticks, one.pid), default=None)
    return f"{oldest.pid} {oldest.start_ticks}" if oldest else str(target.addresses)


def _say(seen: Examined, options: DoctorOptions) -> None:
    if sys.stderr.isatty():
        print(_WIPE, end="", file=sys.stderr, flush=True)
    if options.json:
        print(msgspec.json.encode(as_json([seen])).decode(), flush=True)
        return
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"{now}  {printable(name_of(seen.view.case.target))}: {headline(seen.verdict)}"
    is_bad = seen.verdict.condition in (Condition.STUCK, Condition.DEAD)
    print(f"{line} What to do: {printable(seen.verdict.remedy)}" if is_bad else line, flush=True)


def _beat(text: str) -> None:
    """A line that is written over, so that one sees that it lives."""
    if sys.stderr.isatty():
        print(f"{_WIPE}{time.strftime('%H:%M:%S')}  {text[:150]}", end="", file=sys.stderr, flush=True)
