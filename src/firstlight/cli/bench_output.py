"""What the commands of `firstlight bench` share: where results go, a progress bar, and tables.

Invariant: tables go to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

JsonFile = Annotated[Path | None, typer.Option("--json", help="Store the numbers as JSON.", metavar="FILE")]
PngFile = Annotated[Path | None, typer.Option("--png", help="Store a picture.", metavar="FILE")]

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A GGUF file, a folder or a hub id. Default: the embedded model.", metavar="MODEL"),
]
ServerFlags = Annotated[
    list[str] | None,
    typer.Option(help="Flag for the server, as --flag=--threads=1; repeatable.", metavar="FLAG"),
]


class Output:
    """Where the results of one benchmark go. Made before anything is loaded: a bad path is said first."""

    def __init__(self, kind: str, json: Path | None, png: Path | None = None) -> None:
        from firstlight.bench.report import require_writable

        require_writable(json, png)
        self._kind, self._json, self._png = kind, json, png

    def hand_over(
        self, report: Any, *shown: Table | str, plot: Callable[[Any, Path], None] | None = None
    ) -> None:
        """Prints what is `shown`, and stores the numbers and the picture if they are wanted."""
        from firstlight.bench.report import save_json

        show(*shown)
        if self._json is not None:
            save_json(self._json, self._kind, report)
        if self._png is not None and plot is not None:
            plot(report, self._png)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, or lines where that is no terminal, that a function of (done, total) moves."""
    from firstlight.drafter.progress import Meter

    with Meter("bench", what, 0) as meter:
        yield meter.reach


def show(*items: Table | str) -> None:
    """Prints tables and texts to standard output, never cut to the width of a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=240)
    for item in items:
        if not isinstance(item, str):
            # A title of the table's own would be folded to the width of its columns.
            console.print(item.title, style="bold", markup=False)
            item.title = None
        console.print(item, markup=False)
        console.print()
