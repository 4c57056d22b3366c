"""`firstlight blackbox`: what the processes of a run wrote into their black boxes, as one timeline.

Invariant: it only reads, so it may be asked about a run that hangs, as often as one likes; and about one
whose processes are all dead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from firstlight.base.errors import UsageError
from firstlight.cli.options import Debug


@dataclass
class BlackboxOptions:
    """What `blackbox` takes."""

    run_dir: Annotated[
        Path | None,
        typer.Argument(
            help="A run's directory. Default: that of your only running server.", metavar="RUN_DIR"
        ),
    ] = None
    last: Annotated[int, typer.Option(help="Show the latest N events.", metavar="N", min=0)] = 40
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    debug: Debug = False


def blackbox(options: BlackboxOptions) -> None:
    """Show what all processes of a run did and where they are, as one timeline.

    Every process writes where it is into a file in memory, which can be read while it hangs and after it was
    killed. Phases are all shown; of the events, the latest.

    Examples:
      firstlight blackbox
      firstlight blackbox /tmp/firstlight-ab12cd34 --last 200
      firstlight blackbox --json
    """
    from firstlight.launch.timeline.timeline import read_timeline
    from firstlight.launch.timeline.timeline_text import text_of

    timeline = read_timeline(options.run_dir or _only_run(), options.last)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(timeline), indent=2).decode())
    else:
        print("\n".join(text_of(timeline)))


def _only_run() -> Path:
    from firstlight.launch.runs.run_directory import ended_runs, living_runs

    living = living_runs()
    if len(living) == 1:
        return next(iter(living))
    if living:
        rows = [
            f"{path} (pid {record.pid}, since {_when(record.started_s)})" for path, record in living.items()
        ]
        raise UsageError(f"{len(rows)} servers are running: {', '.join(rows)}.", "Name one of them.")
    kept = ", ".join(str(path) for path in ended_runs())
    left = f"Name a run that ended: {kept}." if kept else "Start one with `firstlight serve`."
    raise UsageError("no server of yours is running.", left)


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
