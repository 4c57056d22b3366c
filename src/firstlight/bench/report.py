"""How results leave a benchmark: a table for people, a JSON file for programs, and where they came from.

Invariant: every JSON file says which version, machine and time its numbers belong to.
"""

from __future__ import annotations

import datetime
import importlib.util
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from firstlight import __version__
from firstlight.base.errors import ResourceError, UsageError
from firstlight.bench.measures import PERCENTS, Summary
from firstlight.facts.machine.machine import inspect_machine


def provenance() -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    machine = inspect_machine(with_gpus=False)
    return {
        "firstlight": __version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": machine.cpu_model,
        "threads_usable": machine.num_usable_cores,
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def save_json(path: Path, kind: str, report: Any) -> None:
    """Writes a report (dataclasses and plain values) with its provenance."""
    content = {"benchmark": kind, "provenance": provenance(), **msgspec.to_builtins(report, str_keys=True)}
    data = msgspec.json.format(msgspec.json.encode(content), indent=2)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}.", "Choose another path.") from error


def require_writable(*paths: Path | None) -> None:
    """Raises before a long run where its results could not be stored after it."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder.", "Make it, or give another path.")
        if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "pictures need matplotlib, which is not installed.",
                "Run `pip install 'firstlight[plots]'`, or leave out --png.",
            )


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column to the left, all others to the right."""
    table = Table(title=title, box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what is to be said of them."""
    table = Table(title=title, box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


SUMMARY_COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")


def summary_row(name: str, summary: Summary | None, scale: float = 1.0) -> tuple[str, ...]:
    """The cells of one distribution under `SUMMARY_COLUMNS`, after its name."""
    if summary is None:
        return (name, *("-" for _ in SUMMARY_COLUMNS))
    values = (summary.mean, *(summary.percentiles[percent] for percent in PERCENTS), summary.largest)
    return (name, *(f"{value * scale:,.1f}" for value in values))
