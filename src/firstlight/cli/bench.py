"""`firstlight bench`: the group of commands that measure.

Each prints a table for people; --json and --png store the same numbers. Invariant: `firstlight --help` loads
none of the room `bench`.
"""

from __future__ import annotations

import typer

from firstlight.cli.bench_collectives import collectives
from firstlight.cli.bench_engine import blackbox, offline, operators, quality, scheduler, startup
from firstlight.cli.bench_serving import path, serving, soak
from firstlight.cli.bench_speculation import speculation
from firstlight.cli.options import add_command

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a running server, the engine, a start, quality, or a soak.",
)

add_command(bench_app, serving)
add_command(bench_app, offline)
add_command(bench_app, operators)
add_command(bench_app, collectives)
add_command(bench_app, startup)
add_command(bench_app, quality)
add_command(bench_app, speculation)
add_command(bench_app, scheduler)
add_command(bench_app, blackbox)
add_command(bench_app, path)
add_command(bench_app, soak)
