"""What other clients send and mean: HEAD, slashes, another protocol, a host that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.api_server import ApiServer, says
from support.raw_http import CHAT, connect, post, send

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=[(), ("secret",)], ids=["open", "with keys"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    with ApiServer(says("ok"), keys=request.param) as running:
        yield running


def test_who_asks_for_another_protocol_is_answered_in_this_one(server: ApiServer) -> None:
    """As a server may: Java's client asks for HTTP/2 with its first request, whose body must not be lost."""
    body = json.dumps({"messages": USER}).encode()
    more = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAA\r\n"
    request = post(body).replace(b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer secret\r\n" + more)
    with connect(server) as raw:
        for _ in range(2):
            send(raw, request)
            answer = raw.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"content":"ok"' in answer


def test_head_is_get_without_the_body(server: ApiServer) -> None:
    with server.http(headers={"authorization": "Bearer secret"}) as http:
        for path in (
            "/health",
            "/v1/models",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/version",
            "/startup/events",
        ):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"] == http.get(path).headers["content-type"]
        assert http.head(CHAT).status_code == 405
        assert http.head("/nowhere").status_code == 404


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models/", "///v1///models//"])
def test_slashes_too_many_change_nothing(server: ApiServer, path: str) -> None:
    with connect(server) as raw:
        send(raw, f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models//", "/health/../v1/models", "/%2fv1/models", "//"]
)
def test_no_way_of_writing_a_path_leads_around_the_keys(path: str) -> None:
    with ApiServer(keys=["secret"]) as server, connect(server) as raw:
        send(raw, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 401"


def test_a_host_that_is_none_is_no_fault_of_the_server(server: ApiServer) -> None:
    with connect(server) as raw:
        send(raw, b"GET /nowhere HTTP/1.1\r\nHost: [\r\nAuthorization: Bearer secret\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 404"
