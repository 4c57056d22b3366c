"""The api process from its imports to its end: what the handlers share, the HTTP side, the event loop.

Invariant: on SIGTERM it answers new requests with 503, lets open ones finish within `drain_s`, and closes the
socket for everybody.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from firstlight.base.blackbox.recorder import Recorder
from firstlight.base.blackbox.writer import BlackBox
from firstlight.base.config import API_KEYS_FILE, API_SOCKET, RunConfig, ServerSection
from firstlight.base.errors import UsageError
from firstlight.base.heap import give_back_heap
from firstlight.base.phases import BUILD, READY, PhaseReporter
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.serve.app import make_app
from firstlight.serve.engine_link.control_link import ControlLink
from firstlight.serve.engine_link.engine_client import EngineClient
from firstlight.serve.http.connections import Guard
from firstlight.serve.http.http1 import Http1Protocol
from firstlight.serve.http.http_server import HttpServer
from firstlight.serve.http.logs import set_up
from firstlight.serve.http.metrics import Metrics
from firstlight.serve.openai.sampling import DEFAULTED
from firstlight.serve.parsing.registry import choose_parsers
from firstlight.serve.server import Server
from firstlight.text.model import TextModel

KEEP_ALIVE_S = 75  # longer than the common 60 s of proxies, so that they close first


def run_api(config: RunConfig, listener_fd: int, control_fd: int, box: BlackBox) -> None:
    """Serves until it is asked to stop. Takes over both descriptors."""
    set_up(config.server.log_format)
    report = PhaseReporter(box).report
    report(BUILD, detail="tokenizer and chat template")
    server = make_server(config)
    http = make_http(server, read_api_keys(Path(config.run_dir)), box)
    give_back_heap()
    report(READY, detail="waiting for the engine")
    # What was made until now lives as long as the process; the collector need not walk it between tokens.
    gc.freeze()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(_serve(server, http, listener_fd, control_fd))


async def _serve(server: Server, http: HttpServer, listener_fd: int, control_fd: int) -> None:
    control, listener = socket.socket(fileno=control_fd), socket.socket(fileno=listener_fd)
    link = ControlLink(control, listener, http, server.client, server.startup)
    link.start()
    try:
        await http.run_private(str(Path(server.config.run_dir) / API_SOCKET))
    finally:
        link.close()


def make_http(server: Server, api_keys: Sequence[str] = (), recorder: Recorder | None = None) -> HttpServer:
    """The HTTP side of `server`, whose event loop ticks in `recorder`.

    Raises `UsageError` for TLS files that do not fit.
    """
    limits = server.config.server
    settings = http_settings(make_app(server, api_keys), limits)
    guard = Guard(limits, server.metrics.record_refusal)
    return HttpServer(settings, server.client, limits.drain_s, guard, recorder)


def http_settings(app: ASGIApp, limits: ServerSection) -> uvicorn.Config:
    """uvicorn's settings for an application. Raises `UsageError` for TLS files that do not fit."""
    check_tls(limits)
    return uvicorn.Config(
        app,
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
    model = config.model
    text = TextModel.load(model.path, model.chat_template, trust_remote_code=model.trust_remote_code)
    text.check_template()
    description = checkpoint.description
    parsers = choose_parsers(
        config.server.tool_call_parser,
        config.server.reasoning_parser,
        description.architecture,
        lambda token: text.token_id(token) is not None,
    )
    return Server(
        config,
        text,
        EngineClient(config.run_dir, metrics.on_step),
        metrics,
        frozenset(description.eos_token_ids),
        defaults,
        parsers,
    )


def read_api_keys(run_dir: Path) -> tuple[str, ...]:
    """The keys in the run directory, one a line; none if the file is absent."""
    path = run_dir / API_KEYS_FILE
    if not path.exists():
        return ()
    return tuple(key for line in path.read_text(encoding="utf-8").splitlines() if (key := line.strip()))


def event_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop that there is here."""
    # Imported here: uvloop exists only where pyproject.toml asks for it.
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
