"""Addresses of servers, and the remedy for one whose certificate nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.base.errors import ResourceError
from firstlight.cli.chat_client import ChatClient
from support.tls import tls_server

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\nConnection: close\r\n\r\n{"data":[{"id":"found"}]}\n'


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server with a certificate of its own; it lists one model."""
    with tls_server(tmp_path, ANSWER) as port:
        yield f"https://127.0.0.1:{port}"


def test_a_certificate_of_ones_own_has_a_remedy_and_the_remedy_works(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChatClient(address, None, lambda *_: None) as client, pytest.raises(ResourceError) as caught:
        client.first_model()
    assert "SSL_CERT_FILE" in caught.value.hint
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with ChatClient(address, None, lambda *_: None) as client:
        assert client.first_model() == "found"


def test_who_does_not_answer_is_named() -> None:
    nobody = ChatClient("http://127.0.0.1:1", None, lambda *_: None)
    with nobody as client, pytest.raises(ResourceError, match="127.0.0.1:1") as caught:
        client.first_model()
    assert "serve" in caught.value.hint
