"""uvicorn's HTTP/1.1 protocol, with our shape of error for what is not HTTP at all.

Chosen by `serve.api`. Invariant: the answer to a broken request line or header is JSON like every other
error, and closes the connection.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firstlight.base.errors import RequestError
from firstlight.serve.errors import error_bytes


class Http1Protocol(HttpToolsProtocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that its parser refuses."""
        body = error_bytes(RequestError(f"{msg} Send HTTP/1.1.", code="invalid_http"))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
