"""`firstlight serve` without its flags: bind, locate the model, start the children, follow them to the end.

Called by the cli. Invariant: the public socket listens before anything slow begins, and whatever happens a
Unix socket is removed, and the run directory too, unless it holds the logs of a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec

from firstlight.base.clock import Clock, SystemClock
from firstlight.base.config import EngineSection, RunConfig, ServerSection, write_config
from firstlight.base.errors import EngineError
from firstlight.base.resolve import Resolved, located
from firstlight.facts.sources import DEFAULT_NAME
from firstlight.launch.children import Children
from firstlight.launch.commands import child_specs
from firstlight.launch.console import Console
from firstlight.launch.control import LaunchState
from firstlight.launch.files import check_files
from firstlight.launch.listen import bound_port, listen
from firstlight.launch.logs import log_path, write_logs
from firstlight.launch.run_directory import make_run_directory, remove_ended_runs, write_api_keys
from firstlight.launch.supervisor import supervise
from firstlight.launch.verdict import FAILURE_CODES, Verdict, title, verdict


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the user wants served. `cores`: those we may use."""

    resolved: Resolved
    model: str | None
    api_keys: tuple[str, ...] = ()
    cores: tuple[int, ...]
    debug: bool = False


def serve(
    order: Order,
    locate: Callable[[str | None], Path],
    stream: TextIO,
    clock: Clock | None = None,
) -> int:
    """Serve until asked to stop; the exit code. Raises the errors that come before the first child."""
    clock = clock or SystemClock()
    console = Console(stream, clock.now_s(), order.resolved.engine.tensor_parallel, bool(order.api_keys))
    check_files(order.resolved.model, order.resolved.server)
    listener = listen(order.resolved.server)
    try:
        server = msgspec.structs.replace(order.resolved.server, port=bound_port(listener))
        path = locate(order.model)
        _require_servable(path, order.resolved.engine)
        remove_ended_runs()
        directory = make_run_directory()
        has_failed = False
        try:
            config = _write_run(order, server, path, directory.path)
            console.opening(config)
            specs = child_specs(config, listener.fileno(), order.cores)
            initial = LaunchState(running=tuple(spec.name for spec in specs), drain_s=server.drain_s)
            with Children(config, specs, console, clock) as children:
                state = supervise(initial, children, clock)
            end = verdict(state)
            has_failed = end.failure is not None and end.failure.exit_code in FAILURE_CODES
            if has_failed:
                write_logs(directory.path, state.deaths)
            _say_end(end, directory.path, console)
            return end.exit_code
        finally:
            directory.close(keep_logs=has_failed)
    finally:
        listener.close()
        if order.resolved.server.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(order.resolved.server.uds)


def _require_servable(path: Path, engine: EngineSection) -> None:
    """Reads headers only: what cannot be served is said before any process is started for it."""
    from firstlight.facts.checkpoint import open_checkpoint  # these bring numpy; the socket comes first
    from firstlight.loading.fit import require_fit

    require_fit(open_checkpoint(path), engine)


def _write_run(order: Order, server: ServerSection, path: Path, run_dir: Path) -> RunConfig:
    """Everything the children read, in place before the first of them starts."""
    config = RunConfig(
        run_dir=str(run_dir),
        model=located(order.resolved.model, order.model, path, DEFAULT_NAME),
        engine=order.resolved.engine,
        server=server,
        debug=order.debug,
    )
    write_config(config)
    if order.api_keys:
        write_api_keys(run_dir, order.api_keys)
    return config


def _say_end(end: Verdict, run_dir: Path, console: Console) -> None:
    """How it ended, and after a failure where to read more."""
    if end.failure is None or end.death is None:
        console.closing()
        return
    console.failed(EngineError(end.failure.message, end.failure.hint).explain())
    log = log_path(run_dir, end.death.name)
    if log.exists():
        console.say(f"  the log of {title(end.death.name)} is {log}")
