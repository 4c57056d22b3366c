"""Entry point of the api process: `python -m firstlight.serve.api --run-dir D --fd N`.

Started by `launch` with the public socket, which already listens. Invariant: on SIGTERM it answers new
requests with 503, lets open ones finish within `drain_s`, closes the socket for everybody, and ends with
code 0; it never ends silently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

import uvicorn

from firstlight.base.config import API_KEYS_FILE, RunConfig, ServerSection, read_config
from firstlight.base.errors import FirstlightError, UsageError
from firstlight.base.failure import write_failure
from firstlight.facts.checkpoint import open_checkpoint
from firstlight.serve.app import make_app
from firstlight.serve.client import EngineClient
from firstlight.serve.http1 import Http1Protocol
from firstlight.serve.logs import set_up
from firstlight.serve.metrics import Metrics
from firstlight.serve.sampling import DEFAULTED
from firstlight.serve.server import Server
from firstlight.text.model import TextModel

CLOSE_MARGIN_S = 2.0  # after the engine's deadline, for the last bytes to clients
DRAIN_LOOK_S = 0.02
KEEP_ALIVE_S = 75  # longer than the common 60 s of proxies, so that they close first


class HttpServer(uvicorn.Server):
    """uvicorn, stopping in our order: refuse new requests, drain the engine, then close."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM asks for a stop; unlike uvicorn's own handler, it is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask_to_stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it was asked to stop; it accepts until the last open request has ended.

        Whoever comes meanwhile is told so by the gate, at once: the launcher holds the socket too, so that
        connections nobody accepts would wait in the kernel.
        """
        drained_s = monotonic() + self._drain_s + CLOSE_MARGIN_S / 2
        self._client.drain(self._drain_s)
        while self._client.num_open and monotonic() < drained_s:
            await asyncio.sleep(DRAIN_LOOK_S)
        left_s = drained_s + CLOSE_MARGIN_S / 2 - monotonic()
        self.config.timeout_graceful_shutdown = max(1, round(left_s))
        ours = [listener.dup() for listener in sockets or ()]  # the event loop closes those it was given
        for server in self.servers:
            server.close()
        for listener in ours:
            _stop_listening(listener)
        await super().shutdown(sockets)

    def ask_to_stop(self) -> None:
        """Begins a graceful stop; may be called from any thread."""
        self.should_exit = True

    async def run_on(self, listener: socket.socket) -> None:
        """Serves on `listener`, which it closes, until asked to stop."""
        self._client.start()
        try:
            await self.serve(sockets=[listener])
        finally:
            await self._client.close()


def _stop_listening(listener: socket.socket) -> None:
    """Ends the socket itself, not only our hold on it: from now on clients are refused, not left waiting."""
    with listener, contextlib.suppress(OSError):  # not every system can; there, the launcher's end does it
        listener.shutdown(socket.SHUT_RDWR)


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
        http = make_http(make_server(config), read_api_keys(arguments.run_dir))
        # What was made until now lives as long as the process; the collector need not walk it between tokens.
        gc.freeze()
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            runner.run(http.run_on(listener))
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(arguments.run_dir, "api", error)
        if config.debug:
            traceback.print_exc()
        return error.exit_code if isinstance(error, FirstlightError) else 1
    return 0


def make_http(server: Server, api_keys: Sequence[str] = ()) -> HttpServer:
    """The HTTP side of `server`; raises `UsageError` for TLS files that do not fit."""
    limits = server.config.server
    check_tls(limits)
    settings = uvicorn.Config(
        make_app(server, api_keys),
        http=Http1Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=limits.tls_cert,
        ssl_keyfile=limits.tls_key,
    )
    return HttpServer(settings, server.client, limits.drain_s)


def check_tls(limits: ServerSection) -> None:
    """Refuses certificate files that cannot be used, before a client meets them."""
    if limits.tls_cert is None and limits.tls_key is None:
        return
    if limits.tls_cert is None or limits.tls_key is None:
        raise UsageError("TLS needs both files.", "Give --tls-cert and --tls-key together.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(limits.tls_cert, limits.tls_key)
    except OSError as error:  # ssl.SSLError is one too
        reason = error.strerror or str(error)
        raise UsageError(
            f"The TLS files {limits.tls_cert} and {limits.tls_key} cannot be used: {reason}",
            "Give a certificate chain and its unencrypted private key, both in PEM form.",
        ) from error


def make_server(config: RunConfig) -> Server:
    """What the handlers share, for the model of `config`; the engine is found in its run directory."""
    metrics = Metrics()
    checkpoint = open_checkpoint(config.model.path)
    defaults = {name: value for name, value in checkpoint.generation_defaults.items() if name in DEFAULTED}
    text = TextModel.load(config.model.path, config.model.chat_template)
    text.check_template()
    return Server(
        config,
        text,
        EngineClient(config.run_dir, metrics.on_step),
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
