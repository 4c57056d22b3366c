"""Addresses of servers, and the remedy for one whose certificate nobody knows."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.base.errors import ResourceError
from firstlight.cli.chat_client import ChatClient
from support.tls import write_tls_files

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\nConnection: close\r\n\r\n{"data":[{"id":"found"}]}\n'


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[str]:
    """The address of a server with a certificate of its own; it lists one model."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*write_tls_files(tmp_path))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
                connection.recv(65536)
                connection.sendall(ANSWER)

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_certificate_of_ones_own_has_a_remedy_and_the_remedy_works(
    tls_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChatClient(tls_server, None, lambda *_: None) as client, pytest.raises(ResourceError) as caught:
        client.first_model()
    assert "SSL_CERT_FILE" in caught.value.hint
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with ChatClient(tls_server, None, lambda *_: None) as client:
        assert client.first_model() == "found"


def test_who_does_not_answer_is_named() -> None:
    nobody = ChatClient("http://127.0.0.1:1", None, lambda *_: None)
    with nobody as client, pytest.raises(ResourceError, match="127.0.0.1:1") as caught:
        client.first_model()
    assert "serve" in caught.value.hint
