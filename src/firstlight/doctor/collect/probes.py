"""Asking the server as a client would: is the port open, does it answer, does it make a token.

Plain sockets, so that no proxy variable of ours or of the server is ever heeded. Invariant: each request has
its own deadline, and an open port that says nothing is told apart from a closed one.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from firstlight.base.loopback import is_here
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import RUN, Engine
from firstlight.doctor.case.values_host import Generation, HttpProbe, RequestLoad
from firstlight.doctor.collect.scene import Collector, Scene

_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_BODY_CHARS = 1500
_PATHS = {Engine.NATIVE: ("/health", "/startup"), Engine.UNKNOWN: ("/health",)}
_LOAD = re.compile(
    r"^(?:vllm:num_requests_|sglang:num_|firstlight:(?:requests|sequences)_)"
    r"(running|waiting|running_reqs|queue_reqs)(?:\{[^}]*\})? ([0-9.e+]+)",
    re.MULTILINE,
)
_TOKENS = re.compile(
    r"^(?:vllm|sglang|firstlight):(?:generation|prompt)_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE
)
_LOOPBACK = {"127.0.0.1": "::1", "::1": "127.0.0.1"}


@dataclass(frozen=True)
class Answer:
    """What came of one request."""

    outcome: str
    status: int | None = None
    seconds: float = 0.0
    body: str = ""
    headers: dict[str, str] | None = None


@dataclass(frozen=True)
class Request:
    """One request to one address."""

    host: str
    port: int
    path: str
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> bytes:
        """The bytes on the wire; the connection is closed after the answer."""
        method = "GET" if self.body is None else "POST"
        shown = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path} HTTP/1.1", f"Host: {shown}:{self.port}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(self.body)}"]
        return "\r\n".join((*lines, "", "")).encode() + (self.body or b"")


def ask(request: Request, timeout_s: float = _TIMEOUT_S) -> Answer:
    """One request; with TLS when the port asks for it, or closes without a word as some do that want it.

    Never raises for what the network does.
    """
    answer = _ask(request, timeout_s, is_tls=False)
    if answer.outcome not in ("tls", "reset"):
        return answer
    # Its certificate is not checked, so a key goes to this machine only.
    headers = request.headers if is_here(request.host) else ()
    with_tls = _ask(replace(request, headers=headers), timeout_s, is_tls=True)
    return answer if answer.outcome == "reset" == with_tls.outcome else with_tls


def _ask(request: Request, timeout_s: float, *, is_tls: bool) -> Answer:
    start_s = time.monotonic()
    received = bytearray()
    outcome = "unreachable"
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(
                socket.create_connection((request.host, request.port), timeout=timeout_s)
            )
            outcome = "silent"  # it is open; from here on a timeout means that it says nothing
            if is_tls:
                connection = stack.enter_context(_wrap(connection))
            connection.sendall(request.encoded())
            _read(connection, received, start_s + timeout_s)
            outcome = "answered" if received else "reset"  # closed without a word
    except TimeoutError:
        pass  # before the connection: unreachable; after it: silent
    except ConnectionRefusedError:
        outcome = "refused"
    except OSError:
        outcome = "reset" if outcome == "silent" else "unreachable"
    return _answer(bytes(received), outcome, time.monotonic() - start_s, is_tls)


def _wrap(connection: socket.socket) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname = False  # we ask whether it answers, not who it is
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


def _read(connection: socket.socket, received: bytearray, until_s: float) -> None:
    while len(received) < _MAX_ANSWER_BYTES:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        data = connection.recv(65536)
        if not data:
            return
        received += data


def _answer(data: bytes, outcome: str, seconds: float, is_tls: bool) -> Answer:
    if data[:2] == b"\x15\x03" or b"plain HTTP request was sent to HTTPS" in data:
        return Answer("tls" if not is_tls else "answered", None, seconds)
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not head.startswith(b"HTTP/") or len(words) < 2 or not words[1].isdigit():
        return Answer(outcome, None, seconds, data[:200].decode("utf-8", "replace"))
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Answer("answered", int(words[1]), seconds, body.decode("utf-8", "replace"), headers)


def collect_http(scene: Scene) -> Iterator[Observation]:
    """The health of each address, on both loopback addresses where it is local."""
    for host, port in scene.target.addresses:
        for path in _PATHS.get(scene.target.engine, ("/health", "/v1/models")):
            for address in dict.fromkeys((host, _LOOPBACK.get(host, host))):
                request = Request(address, port, path, headers=scene.options.headers)
                answer = ask(request)
                url = f"http://{host}:{port}{path}"
                yield Observation(subject=RUN, source=f"GET {url}", value=_probe(url, address, answer))


def _probe(url: str, address: str, answer: Answer) -> HttpProbe:
    after = (answer.headers or {}).get("retry-after", "")
    return HttpProbe(
        url=url,
        address=address,
        outcome=answer.outcome,
        status=answer.status,
        seconds=round(answer.seconds, 4),
        body=hide_in_text(answer.body)[:_MAX_BODY_CHARS],
        retry_after_s=float(after) if after.isdigit() else None,
    )


def collect_generation(scene: Scene) -> Iterator[Observation]:
    """One token through the real path, if a person allowed it: readiness is this and nothing less."""
    if not scene.options.with_generation:
        return
    for host, port in scene.target.addresses:
        models = ask(Request(host, port, "/v1/models", headers=scene.options.headers))
        name = _first_model(models.body) or scene.target.model or "default"
        body = msgspec.json.encode({"model": name, "prompt": "Hi", "max_tokens": 1, "temperature": 0})
        request = Request(host, port, "/v1/completions", body, scene.options.headers)
        answer = ask(request, scene.options.generation_deadline_s)
        url = f"http://{host}:{port}/v1/completions"
        value = Generation(
            url=url,
            has_token=answer.status == 200 and '"choices"' in answer.body,
            status=answer.status,
            seconds=round(answer.seconds, 4),
            note=answer.outcome if answer.status is None else hide_in_text(answer.body)[:300],
        )
        yield Observation(subject=RUN, source=f"POST {url}", value=value)


def collect_load(scene: Scene) -> Iterator[Observation]:
    """How many requests run and wait, where the metrics say so."""
    for host, port in scene.target.addresses:
        answer = ask(Request(host, port, "/metrics", headers=scene.options.headers))
        found = {"running": 0, "waiting": 0}
        matches = _LOAD.findall(answer.body) if answer.status == 200 else []
        for name, amount in matches:
            found["running" if "running" in name else "waiting"] += int(float(amount))
        if matches:
            url = f"http://{host}:{port}/metrics"
            tokens = [float(amount) for amount in _TOKENS.findall(answer.body)]
            load = RequestLoad(url=url, **found, tokens=int(sum(tokens)) if tokens else None)
            yield Observation(subject=RUN, source=f"GET {url}", value=load)


def _first_model(body: str) -> str | None:
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return None


LOAD = Collector("request-load", collect_load, deadline_s=5.0)
HTTP = Collector("http", collect_http, deadline_s=9.0)
GENERATION = Collector("generation", collect_generation, deadline_s=15.0, is_dynamic=False)
