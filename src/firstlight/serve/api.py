"""Entry point of the api process: `python -m firstlight.serve.api --run-dir D --fd N`.

Started by `launch` with the public socket, which already listens. Invariant: on SIGTERM it stops accepting,
lets open requests finish within `drain_s`, and ends with code 0; it never ends silently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from firstlight.base.config import API_KEYS_FILE, RunConfig, read_config
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import write_failure
from firstlight.facts.checkpoint import open_checkpoint
from firstlight.serve.app import make_app
from firstlight.serve.client import EngineClient
from firstlight.serve.logs import set_up
from firstlight.serve.metrics import Metrics
from firstlight.serve.sampling import DEFAULTED
from firstlight.serve.server import Server
from firstlight.text.model import TextModel

CLOSE_MARGIN_S = 2.0  # after the engine's deadline, for the last bytes to clients
KEEP_ALIVE_S = 75  # longer than the common 60 s of proxies, so that they close first


class HttpServer(uvicorn.Server):
    """uvicorn, stopping in our order: no new requests, drain the engine, then close."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask for a stop; unlike uvicorn's own handler they are not raised again at the end."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it was asked to stop."""
        self._client.drain(self._drain_s)
        await super().shutdown(sockets)

    def _ask_to_stop(self) -> None:
        self.should_exit = True


def main() -> int:
    """Runs the api process; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides; a terminal sends it to all of us
    config = read_config(arguments.run_dir)
    set_up(config.server.log_format)
    try:
        listener = socket.socket(fileno=arguments.fd)
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            runner.run(serve(config, read_api_keys(arguments.run_dir), listener))
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(arguments.run_dir, "api", error)
        if config.debug:
            traceback.print_exc()
        return error.exit_code if isinstance(error, FirstlightError) else 1
    return 0


async def serve(config: RunConfig, api_keys: tuple[str, ...], listener: socket.socket) -> None:
    """Serves on `listener` until asked to stop. The engine is found in the run directory."""
    metrics = Metrics()
    client = EngineClient(config.run_dir, metrics.on_step)
    client.start()
    try:
        app = make_app(make_server(config, client, metrics), api_keys)
        limits = config.server
        settings = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(limits.drain_s + CLOSE_MARGIN_S),
            ssl_certfile=limits.tls_cert,
            ssl_keyfile=limits.tls_key,
        )
        await HttpServer(settings, client, limits.drain_s).serve(sockets=[listener])
    finally:
        await client.close()


def make_server(config: RunConfig, client: EngineClient, metrics: Metrics) -> Server:
    """What the handlers share, for the model of `config`."""
    checkpoint = open_checkpoint(config.model.path)
    defaults = {name: value for name, value in checkpoint.generation_defaults.items() if name in DEFAULTED}
    return Server(
        config,
        TextModel.load(config.model.path, config.model.chat_template),
        client,
        metrics,
        frozenset(checkpoint.description.eos_token_ids),
        defaults,
    )


def read_api_keys(run_dir: Path) -> tuple[str, ...]:
    """The keys in the run directory, one a line; none if the file is absent."""
    path = run_dir / API_KEYS_FILE
    if not path.exists():
        return ()
    return tuple(key for line in path.read_text(encoding="utf-8").splitlines() if (key := line.strip()))


def _event_loop() -> asyncio.AbstractEventLoop:
    # Imported here: uvloop exists only where pyproject.toml asks for it.
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
