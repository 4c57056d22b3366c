"""A timeline for people: a head that says where each process is, then what happened, a line each.

Pure. Invariant: what a box said is shown on one line, whatever is in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from firstlight.base.blackbox.reader import Collective, Odometer
from firstlight.launch.terminal.amounts import amount
from firstlight.launch.timeline.timeline import ALIVE, EventEntry, PhaseEntry, ProcessLine, Timeline

_HEAD = ("process", "role", "rank", "pid", "state", "phase", "step", "running", "waiting", "entered", "left")
_TIMES = f"{'time':<12}  {'since start':>12}  {'gap':>9}"


def text_of(timeline: Timeline) -> list[str]:
    """The whole text, line by line."""
    start = time.localtime(timeline.start_s)
    zone = time.strftime("%z", start)
    lines = [
        f"run {timeline.run_id} in {timeline.run_dir}",
        f"started {time.strftime('%Y-%m-%d', start)} {_clock(timeline.start_s)} (UTC{zone}), "
        f"read {_seconds(timeline.read_s - timeline.start_s)} later",
        "",
        *_table([_HEAD, *(_cells(process) for process in timeline.processes)]),
        *(f"{name}: {why}" for name, why in timeline.unreadable.items()),
        *(f"{process.name}: {note}" for process in timeline.processes for note in process.notes),
        *(_silence(process, timeline.read_s) for process in timeline.processes if process.state == ALIVE),
        "",
    ]
    if timeline.events_left_out:
        lines.append(f"({timeline.events_left_out} older events are not shown; --last N shows N)")
    return [_one_line(line) for line in (*lines, *_entries(timeline))]


def _cells(process: ProcessLine) -> tuple[str, ...]:
    return (
        process.name,
        process.role,
        "-" if process.rank is None else str(process.rank),
        "-" if process.pid is None else str(process.pid),
        process.state,
        " ".join(filter(None, (process.phase or "-", _progress(process.odometer)))),
        str(process.step),
        str(process.running),
        str(process.waiting),
        _collective(process.entered),
        _collective(process.left),
    )


def _silence(process: ProcessLine, read_s: float) -> str:
    if process.last_record_s is None or process.phase_s is None:
        return f"{process.name}: has entered no phase"
    silent = _seconds(read_s - process.last_record_s)
    return (
        f"{process.name}: in {process.phase} for {_seconds(process.phase_s)}; its last entry is {silent} old"
    )


def _entries(timeline: Timeline) -> Iterator[str]:
    width = max((len(process.name) for process in timeline.processes), default=0)
    yield f"{_TIMES}  {'process':<{width}}  what"
    last_s = 0.0
    for entry in timeline.entries:
        times = f"{_clock(entry.time_s)}  {entry.since_s:>+12.3f}  {entry.since_s - last_s:>+9.3f}"
        last_s = entry.since_s
        what = _phase(entry) if isinstance(entry, PhaseEntry) else _event(entry)
        yield f"{times}  {entry.process:<{width}}  {what}"


def _phase(entry: PhaseEntry) -> str:
    text = f"enters {entry.phase}"
    if entry.detail:
        text += f": {entry.detail}"
    if entry.before is not None:
        progress = _progress(entry.before.odometer)
        took = _seconds(entry.before.duration_s) + (f", {progress}" if progress else "")
        text += f" ({entry.before.phase} took {took})"
    return text


def _event(entry: EventEntry) -> str:
    values = ", ".join(f"{name} {value}" for name, value in entry.values.items())
    return f"  {entry.event or 'event'} {values} [{entry.ring} {entry.number}]"


def _progress(odometer: Odometer) -> str:
    if odometer.total:
        return (
            f"{amount(odometer.done, odometer.unit, short=True)} of {amount(odometer.total, odometer.unit)}"
        )
    return amount(odometer.done, odometer.unit) if odometer.done else ""


def _collective(collective: Collective) -> str:
    return f"{collective.name} {collective.number}" if collective.name else "-"


def _clock(time_s: float) -> str:
    """Local time to the millisecond."""
    milliseconds = round(time_s * 1000)
    return f"{time.strftime('%H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 60 else f"{seconds:.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _one_line(text: str) -> str:
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
