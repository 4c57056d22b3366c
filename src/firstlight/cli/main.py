"""The `firstlight` program: its commands, gathered.

Invariant: `firstlight --help` loads the cli and base rooms only; each command imports what it needs when it
runs, and `serve` waits for no other command's flags.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from firstlight import __version__
from firstlight.base.settings import ALL_SETTINGS, ENGINE_SETTINGS
from firstlight.cli.options import add_command, guarded
from firstlight.cli.passed_on import PassesOn
from firstlight.cli.serve import serve


def make_app(asked: str | None = None) -> typer.Typer:
    """All commands; `serve` alone where it is asked for, whose first child then starts sooner."""
    app = typer.Typer(
        name="firstlight",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Start with [bold]firstlight serve[/], then [bold]firstlight chat[/] in another terminal. "
        "[bold]firstlight COMMAND --help[/] explains each command with examples.",
    )
    app.callback()(_root)
    add_command(app, serve, settings=ALL_SETTINGS, kind_of_command=PassesOn)
    if asked != "serve":
        _add_the_rest(app)
    return app


def _add_the_rest(app: typer.Typer) -> None:
    from firstlight.cli.bench import bench_app
    from firstlight.cli.blackbox import blackbox
    from firstlight.cli.chat import chat
    from firstlight.cli.convert import convert
    from firstlight.cli.doctor import doctor
    from firstlight.cli.drafter import drafter_app
    from firstlight.cli.env import env
    from firstlight.cli.grammar import grammar
    from firstlight.cli.make_model import make_model
    from firstlight.cli.plan import PLAN_SETTINGS, plan
    from firstlight.cli.profile import profile
    from firstlight.cli.ps import ps
    from firstlight.cli.run import RUN_SETTINGS, run
    from firstlight.cli.stop import stop

    add_command(app, ps)
    add_command(app, stop)
    add_command(app, chat)
    add_command(app, run, settings=RUN_SETTINGS)
    add_command(app, convert)
    add_command(app, make_model)
    add_command(app, env, settings=ENGINE_SETTINGS)
    add_command(app, plan, settings=PLAN_SETTINGS)
    add_command(app, profile)
    add_command(app, blackbox)
    add_command(app, doctor)
    add_command(app, grammar)
    app.add_typer(drafter_app, name="drafter")
    app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"firstlight {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a large language model, and know at every second what it is doing."""


def main() -> None:
    """Run the program and leave with its exit code."""
    app = make_app(next(iter(sys.argv[1:]), None))
    sys.exit(guarded(app, debug=False))  # for what goes wrong outside of a command, as in --help
