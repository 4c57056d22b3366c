"""The start on a terminal: a row for each rank with its phase, a bar, the rate and the time left.

Invariant: lines that are said meanwhile stay above the view, and when it is closed nothing of it is left on
the screen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from firstlight.launch.processes.commands import title
from firstlight.launch.terminal.amounts import amount
from firstlight.launch.timeline.progress import PhaseTrack

_BAR_WIDTH = 24
_REFRESH_S = 0.1


class LiveView:
    """Owns the lower lines of a terminal until `close`."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._shown_s = 0.0

    def say(self, text: str) -> None:
        """A line (or several) above the view."""
        self._console.print(text, soft_wrap=True)

    def show(self, tracks: Mapping[str, PhaseTrack]) -> None:
        """The rows of now; drawn ten times a second at most."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._live.update(_table(tracks), refresh=True)

    def close(self) -> None:
        """Remove it."""
        self._live.update(Text(""), refresh=True)
        self._live.stop()


def _table(tracks: Mapping[str, PhaseTrack]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, track in sorted(tracks.items()):
        table.add_row(*_row(name, track))
    return table


def _row(name: str, track: PhaseTrack) -> list[RenderableType]:
    last, pace = track.last, track.pace
    done = ""
    bar: RenderableType = Text("")
    if last.total:
        bar = ProgressBar(total=last.total, completed=last.done, width=_BAR_WIDTH)
        done = f"{amount(last.done, last.unit, short=True)} of {amount(last.total, last.unit)}"
    elif last.unit:
        bar = ProgressBar(total=None, width=_BAR_WIDTH, pulse=True)
        done = amount(last.done, last.unit)
    rate = f"{amount(pace.per_s, last.unit)}/s" if pace.per_s is not None else ""
    left = f"{pace.remaining_s:.0f} s left" if pace.remaining_s is not None and last.done < last.total else ""
    return [Text(title(name)), Text(last.phase, style="bold"), bar, Text(done), Text(rate), Text(left)]
