"""What the commands of `firstlight bench` share: where results go, a progress bar, and tables.

Used by the files of that group. Invariant: tables go to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error that a function of (done, total) moves; seldom redrawn, as it costs too."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
