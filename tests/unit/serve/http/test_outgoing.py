"""Clients of other servers: which go through a proxy, and what is said of a proxy that cannot be used."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from firstlight.base.errors import UsageError
from firstlight.serve.http.outgoing import open_client
from support.proxies import forget_proxies


class Near(BaseHTTPRequestHandler):
    """Answers that it was asked itself."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def near() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Near) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_proxies(monkeypatch)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://x"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_this_machine_is_asked_directly(
    monkeypatch: pytest.MonkeyPatch, near: int, name: str, proxy: str, host: str
) -> None:
    monkeypatch.setenv(name, proxy)
    with open_client(f"http://{host}:{near}/v1", timeout=10) as http:
        assert http.get("/v1/models").json() == {"path": "/v1/models"}


def test_others_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{near}")
    with open_client("http://far.example", timeout=10) as http:
        assert http.get("/metrics").json() == {"path": "http://far.example/metrics"}


@pytest.mark.parametrize("proxy", ["socks5://me:secret@far:1080", "nonsense://me:secret@far"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_address(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UsageError, match="ALL_PROXY") as caught:
        open_client("http://far.example")
    said = caught.value.explain()
    assert "NO_PROXY" in said
    assert "secret" not in said


@pytest.mark.parametrize("others", ["socks5://far:1080", "nonsense://far"])
def test_only_the_proxy_of_this_address_has_to_be_usable(
    monkeypatch: pytest.MonkeyPatch, near: int, others: str
) -> None:
    """httpx alone builds every proxy of the environment, and fails for one that it would never use."""
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{near}")
    monkeypatch.setenv("ALL_PROXY", others)
    monkeypatch.setenv("https_proxy", others)
    with open_client("http://far.example", timeout=10) as http:
        assert http.get("/metrics").json() == {"path": "http://far.example/metrics"}


def test_what_no_proxy_excepts_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://far")
    monkeypatch.setenv("NO_PROXY", "example.com,far.example")
    open_client("http://far.example").close()
    open_client("https://api.example.com:8000").close()
    with pytest.raises(UsageError, match="ALL_PROXY"):
        open_client("http://other.example")
