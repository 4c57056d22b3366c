"""Progress of a long stage: done of total, rate and time left, as a bar or as a line every few seconds.

Invariant: it goes to standard error, and never more than ten times a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_EVERY_S = 15.0


class Meter:
    """`with Meter("capture", "tokens", total) as meter: meter.add(512)`. `done`: from an earlier run.

    A `total` of 0 is not known yet, see `reach`.
    """

    def __init__(self, what: str, unit: str, total: int, done: int = 0) -> None:
        self.what, self.unit, self.total, self.done = what, unit, total, done
        self._first = done
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._note = ""
        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=2)
        self._task = self._bar.add_task(what, total=total or None, completed=done, text="")

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            self._say()

    @property
    def rate(self) -> float:
        """Units a second since this run began."""
        return (self.done - self._first) / max(time.monotonic() - self._began_s, 1e-9)

    def add(self, num: int, note: str = "") -> None:
        """Counts `num` more units; `note` is shown behind them."""
        self.done += num
        self._note = note or self._note
        self._bar.update(self._task, completed=self.done, text=self.text())
        if self._bar.disable and time.monotonic() - self._shown_s >= LINE_EVERY_S:
            self._say()

    def reach(self, done: int, total: int) -> None:
        """Sets how much is done of how much, where that is known only as the work goes on."""
        self.total = total
        self._bar.update(self._task, total=total)
        self.add(done - self.done)

    def say(self, text: str) -> None:
        """A line of its own, at once."""
        self._bar.console.print(f"{self.what}: {text}", highlight=False, markup=False, soft_wrap=True)

    def text(self) -> str:
        """Done, total, rate and time left, as a person reads them."""
        left_s = (self.total - self.done) / self.rate if self.rate > 0 else None
        left = "" if left_s is None else f", {_duration(left_s)} left"
        note = f", {self._note}" if self._note else ""
        rate, per = (self.rate, "second") if self.rate >= 0.1 else (self.rate * 60, "minute")
        return f"{self.done:,} of {self.total:,} {self.unit}, {rate:,.1f} a {per}{left}{note}"

    def _say(self) -> None:
        self._shown_s = time.monotonic()
        if self._bar.disable:
            print(f"{self.what}: {self.text()}", file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def late_meter(what: str, *, after_s: float = 2.0) -> Iterator[Callable[[int, int], None]]:
    """`progress(done, total)` in bytes, shown in MB by a `Meter` once the work has taken `after_s`."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        meters: list[Meter] = []

        def progress(done_bytes: int, total_bytes: int) -> None:
            done, total = done_bytes // 1_000_000, total_bytes // 1_000_000
            if meters:
                meters[0].add(done - meters[0].done)
            elif time.monotonic() - began_s >= after_s:
                meters.append(stack.enter_context(Meter(what, "MB", total, done)))

        yield progress


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
