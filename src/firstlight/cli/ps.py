"""`firstlight ps`: the servers of this user on this machine, and where each of their processes is.

Invariant: it only reads, so it also tells of a server that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.launch.runs.runs import ProcessView, RunView

_HEADINGS = ("RUN", "PID", "STATUS", "PHASE", "DONE", "WHAT")


@dataclass
class PsOptions:
    """What `ps` takes."""

    all: Annotated[
        bool, typer.Option("--all", metavar="", help="Also what is left of runs that ended in a failure.")
    ] = False
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    debug: Debug = False


def ps(options: PsOptions) -> None:
    """List your running servers, and the phase of each of their processes.

    Examples:
      firstlight ps
      firstlight ps --all --json
    """
    from firstlight.launch.runs.runs import list_runs

    runs = list_runs(with_ended=options.all)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode({"runs": runs}), indent=2).decode())
    elif not runs:
        print("No server of yours is running.")
    else:
        print("\n".join(table(runs)))


def table(runs: list[RunView]) -> list[str]:
    """A row for each run, and beneath it one for each process."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for run in runs:
        where = f"{run.url} through {run.uds}" if run.uds else run.url or ""
        rows.append((run.run_dir, str(run.pid), run.status, "", "", f"{run.model or ''} {where}".strip()))
        rows += [_process_row(process) for process in run.processes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*lines, *(f"{run.run_dir} is {run.status}: {run.verdict}" for run in runs if run.verdict)]


def _process_row(process: ProcessView) -> tuple[str, ...]:
    status = (
        "alive" if process.is_alive else "starting" if process.end is None and not process.pid else "gone"
    )
    if process.end is not None:
        status = "ended" if process.end.told else "lost"
    rank = "" if process.rank is None else f" {process.rank}"
    done = "" if process.percent is None else f"{process.percent:g} %"
    pid = str(process.pid or "")
    what = f"{process.role}{rank}{': ' if process.detail else ''}{process.detail}"
    return f"  {process.name}", pid, status, process.phase or "", done, what
