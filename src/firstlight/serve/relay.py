"""The api process in front of a foreign engine: `python -m firstlight.serve.relay --run-dir D --fd N …`.

It gets the public socket, which already listens, and hands requests on to the engine, which listens for us
alone. Obeys the supervisor as our own api process does. Invariant: it never ends silently: its last words are
in the run directory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.base.allow_ptrace import allow_examination
from firstlight.base.blackbox.store import open_own_box
from firstlight.base.blackbox.writer import BlackBox
from firstlight.base.config import API_SOCKET, RunConfig, read_config
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import write_failure
from firstlight.base.phases import READY, PhaseReporter
from firstlight.serve.engine_link.control_link import ControlLink
from firstlight.serve.foreign.forward import Forward
from firstlight.serve.foreign.upstream import Upstream, read_place
from firstlight.serve.http.connections import Guard
from firstlight.serve.http.http_server import HttpServer
from firstlight.serve.http.logs import set_up
from firstlight.serve.http.metrics import Metrics
from firstlight.serve.http.middleware import with_layers
from firstlight.serve.http.readiness_gate import live_response
from firstlight.serve.openai import replies
from firstlight.serve.process import event_loop, http_settings, read_api_keys


class RelayHttp(HttpServer):
    """While it serves, its odometer counts what the engine has done; see `Upstream`."""

    serving_unit = "tokens and pieces"


class OwnPaths:
    """What the relay answers itself: whether it lives, and how the start went."""

    def __init__(self, inside: ASGIApp, startup: dict[str, Any]) -> None:
        self._inside = inside
        self._startup = startup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        await (answer or self._inside)(scope, receive, send)

    def _answer(self, path: str) -> Response | None:
        if path == "/health/live":
            return live_response(self._startup)
        if path == "/startup":
            return Response(replies.encode(self._startup), media_type="application/json")
        if path == "/startup/events":
            return Response(replies.startup_event(self._startup), media_type="text/event-stream")
        return None


def run_relay(config: RunConfig, listener_fd: int, control_fd: int, box: BlackBox) -> None:
    """Serves until it is asked to stop. Takes over both descriptors."""
    set_up(config.server.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the access log says it already
    upstream = Upstream(read_place(config.run_dir), box)
    startup: dict[str, Any] = {"status": "ready"}
    keys = read_api_keys(Path(config.run_dir))
    limits, metrics = config.server, Metrics()
    app = with_layers(OwnPaths(Forward(upstream, limits), startup), config, upstream, metrics, keys)
    guard = Guard(limits, metrics.record_refusal)
    http = RelayHttp(http_settings(app, limits), upstream, limits.drain_s, guard, box)
    PhaseReporter(box).report(READY, detail=f"waiting for {upstream.place.engine}")
    gc.freeze()

    async def serve() -> None:
        control, listener = socket.socket(fileno=control_fd), socket.socket(fileno=listener_fd)
        link = ControlLink(control, listener, http, upstream, startup)
        link.start()
        try:
            await http.run_private(str(Path(config.run_dir) / API_SOCKET))
        finally:
            link.close()

    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(serve())


def main() -> int:
    """Runs the relay; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    box = open_own_box(arguments.run_dir, "api", role="api")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides; a terminal sends it to all of us
    allow_examination(arguments.run_dir, "api")
    config = read_config(arguments.run_dir)
    try:
        run_relay(config, arguments.fd, arguments.control_fd, box)
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(arguments.run_dir, "api", error)
        if config.debug:
            traceback.print_exc()
        return error.exit_code if isinstance(error, FirstlightError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
