"""A self-signed certificate of localhost for tests; it protects nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgoHl6qhZdmqBzSyQy
V756vyM3o+9D/g0KTrdRtIwtBsehRANCAASz1UZMidbPc+ZWZd3voVZ6BXHICMbI
oEjfd38E9jQz7CZjNjLNcXu9jbbWzsjgvu33D4/ME/XmAJpoHxl8x6C9
-----END PRIVATE KEY-----
"""
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUV3sY7UUvnblnq18G3VSsTGL4WzQwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTE1NDgzMFoYDzIxMjYxMTA1
MTU0ODMwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASz1UZMidbPc+ZWZd3voVZ6BXHICMbIoEjfd38E9jQz7CZjNjLNcXu9
jbbWzsjgvu33D4/ME/XmAJpoHxl8x6C9o28wbTAdBgNVHQ4EFgQUPdsY/BcCWqiZ
HtQS1RQYUx9xx+0wHwYDVR0jBBgwFoAUPdsY/BcCWqiZHtQS1RQYUx9xx+0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhAIPnZEUoE6OQkhpk5pizJFnjP99MG1Yy27aJhhpjpGKbAiEA
t7NooLf0TS6I7cymKNB3ijOxENIYIT9PtwEowufCQ2c=
-----END CERTIFICATE-----
"""


def write_tls_files(folder: Path) -> tuple[str, str]:
    """Writes both files; their paths: certificate, key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_text(_CERTIFICATE)
    key.write_text(_KEY)
    return str(certificate), str(key)


@contextlib.contextmanager
def tls_server(folder: Path, answer: bytes) -> Iterator[int]:
    """The port of a server that gives this answer over TLS, and closes without a word on whatever else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*write_tls_files(folder))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with (
                plain,
                contextlib.suppress(OSError),
                context.wrap_socket(plain, server_side=True) as connection,
            ):
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
