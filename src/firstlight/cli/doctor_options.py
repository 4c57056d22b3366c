"""The options of `firstlight doctor`, as the command and its helpers share them.

Invariant: they say what was asked for; nothing is looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.options import Debug


@dataclass
class DoctorOptions:
    """What `doctor` takes."""

    pid: Annotated[
        int | None, typer.Option(help="The server that this process belongs to.", metavar="PID", min=1)
    ] = None
    url: Annotated[
        str | None, typer.Option(help="The server that listens there, if it is on this machine.")
    ] = None
    run: Annotated[
        str | None,
        typer.Option(help="A run of `firstlight serve`, alive or dead: its directory.", metavar="DIR"),
    ] = None
    watch: Annotated[
        bool,
        typer.Option("--watch", metavar="", help="Stay, and say when the verdict changes; Ctrl-C ends."),
    ] = False
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write all evidence, without secrets, into a new file.", metavar="FILE"),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(help="Judge a bundle; nothing on this machine is looked at.", metavar="FILE"),
    ] = None
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    markdown: Annotated[
        bool, typer.Option("--markdown", metavar="", help="Print an issue for the engine's maintainers.")
    ] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", metavar="", help="Also what is excluded, and each engine's remedy."),
    ] = False
    generate: Annotated[
        bool, typer.Option("--generate", metavar="", help="Ask the server for one token, as a client would.")
    ] = False
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the server's key. Default: the run's own, or FIRSTLIGHT_API_KEY.",
            metavar="FILE",
        ),
    ] = None
    looks: Annotated[int, typer.Option(help="Looks at what moves.", metavar="N", min=1, max=10)] = 2
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", metavar="SECONDS", min=0.1, max=600)
    ] = 2.0
    debug: Debug = False
