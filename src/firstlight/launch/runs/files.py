"""The files that a run names beside its model: checked before anything is started with them.

Invariant: after `check_files`, the certificate fits its key, the template compiles, and every named file can
be read.
"""

from __future__ import annotations

from pathlib import Path

from firstlight.base.config import ModelSection, ServerSection
from firstlight.base.errors import ModelFileError, UsageError


def check_files(model: ModelSection, server: ServerSection) -> None:
    """Raises `UsageError` for a chat template or TLS file that cannot be used."""
    if model.chat_template is not None:
        check_template(model.chat_template)
    if server.tls_cert is not None and server.tls_key is not None:
        _require_readable("--tls-cert", server.tls_cert)
        _require_readable("--tls-key", server.tls_key)
        _require_pair(server.tls_cert, server.tls_key)


def check_template(path: str) -> None:
    """Raises `UsageError` for a --chat-template file that is not there, not text, or not valid Jinja."""
    from firstlight.text.folder import read_template_file  # costs 40 ms, and most runs do without
    from firstlight.text.template import ChatTemplate

    _require_readable("--chat-template", path)
    try:
        ChatTemplate(read_template_file(Path(path)), path)
    except ModelFileError as error:  # here the user's own file is wrong, not the model's
        raise UsageError(f"--chat-template: {error}", "Give a Jinja file in UTF-8.") from error


def _require_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}.", "Check the path.") from error


def _require_pair(certificate: str, key: str) -> None:
    import ssl  # costs 10 ms, and most servers do without

    def no_passphrase() -> str:
        raise UsageError(f"--tls-key {key} asks for a passphrase.", "Give a key without one.")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        raise UsageError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used: {error.reason or error}.",
            "Both must be PEM files, and the key must belong to the certificate.",
        ) from error
