"""`firstlight stop`: end one of this user's servers.

Invariant: nothing but a run of our own user is ever signalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from firstlight.cli.options import Debug


@dataclass
class StopOptions:
    """What `stop` takes."""

    run: Annotated[
        str,
        typer.Argument(
            help="The run's directory, its name, or the pid that `firstlight ps` shows.", metavar="RUN"
        ),
    ]
    now: Annotated[
        bool, typer.Option("--now", metavar="", help="End everything at once: no request finishes.")
    ] = False
    debug: Debug = False


def stop(options: StopOptions) -> None:
    """Stop a server as Ctrl-C does, and wait until it has ended.

    Running requests have the server's --drain seconds to finish. Stopping it again meanwhile, or with --now,
    ends them at once.

    Examples:
      firstlight stop 12345
      firstlight stop --now /tmp/firstlight-ab12cd34
    """
    from firstlight.launch.runs.runs import find_run
    from firstlight.launch.runs.stop import stop_run

    path, record = find_run(options.run)
    stop_run(path, record, now=options.now)
    print(f"{path.name} has ended.")
