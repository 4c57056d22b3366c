"""The real api process's HTTP side in a thread, on a loopback port or a Unix socket, before a fake engine.

Used by the tests of `serve`. Invariant: leaving `ApiServer` has stopped both, within a deadline.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import uvloop

from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection
from firstlight.engine.messages import Submit
from firstlight.serve.engine_link.engine_client import EngineClient
from firstlight.serve.http.http_server import HttpServer
from firstlight.serve.http.metrics import Metrics
from firstlight.serve.parsing.registry import choose_parsers
from firstlight.serve.process import make_http
from firstlight.serve.server import Server
from firstlight.text.model import TextModel
from support.byte_text import END, byte_text, tokens
from support.fake_engine import DEADLINE_S, FakeEngine, Script

MODEL = "tiny"


def says(text: str, **more: Any) -> Callable[[Submit], Script]:
    """A script that answers everything with `text`."""
    return lambda _: Script(tokens(text), END, **more)


class ApiServer:
    """`async` clients and plain ones reach it at `url`. `section` are fields of the server's section."""

    def __init__(
        self,
        script: Callable[[Submit], Script] | None = None,
        *,
        keys: Sequence[str] = (),
        text: TextModel | None = None,
        ready: bool = True,
        defaults: Mapping[str, Any] | None = None,
        engine: EngineSection | None = None,
        **section: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fl-")
        run_dir = Path(self._folder.name)
        self.config = RunConfig(
            run_dir=str(run_dir),
            model=ModelSection(path="/models/tiny", served_names=(MODEL, "alias")),
            engine=engine or EngineSection(),
            server=ServerSection(**section),
        )
        self.metrics = Metrics()
        self.client = EngineClient(run_dir, self.metrics.on_step)
        text = text or byte_text()
        parsers = choose_parsers("auto", "auto", "llama", lambda token: text.token_id(token) is not None)
        ends = frozenset({END if text.eos_token_id is None else text.eos_token_id})
        server = Server(self.config, text, self.client, self.metrics, ends, defaults or {}, parsers)
        self.engine = FakeEngine(run_dir, script or says("Hello!"), max(300, text.vocab_size))
        self._is_ready = ready
        self._http: HttpServer = make_http(server, keys)
        self._listener = _listener(section.get("uds"))
        self.url = "http://localhost"
        if self._listener.family == socket.AF_INET:
            scheme = "https" if section.get("tls_cert") else "http"
            self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.engine.start(ready=self._is_ready)
        self._thread.start()
        if self._is_ready:
            wait_until(lambda: self.client.is_serving, "ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.engine.stop()
        self._folder.cleanup()
        assert self.failure is None, self.failure

    def stop(self) -> None:
        """Asks for a graceful stop and waits for its end."""
        self._http.ask_to_stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the api server did not stop"

    def ask_to_stop(self) -> None:
        self._http.ask_to_stop()

    def listener_twin(self) -> socket.socket:
        """A second hold on the listening socket, as the launcher has one."""
        return self._listener.dup()

    def http(self, **options: Any) -> httpx.Client:
        """A client of this server."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, **options)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._http.run_on(self._listener))
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.failure = error


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition that another thread makes true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not {what} within {DEADLINE_S} s"
        time.sleep(0.005)


def _listener(path: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    listener.bind(path or ("127.0.0.1", 0))
    listener.listen()
    return listener
