"""Templates and certificates, checked before the start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from firstlight.base.config import ModelSection, ServerSection
from firstlight.base.errors import UsageError
from firstlight.launch.runs.files import check_files

MODEL = ModelSection(path="m", served_names=("m",))


def make_pair(folder: Path, name: str, *, passphrase: str | None = None) -> ServerSection:
    """A self-signed certificate and its key."""
    assert shutil.which("openssl"), "these tests need the openssl program"
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    protection = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run(
        [*command, *protection, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return ServerSection(tls_cert=str(cert), tls_key=str(key))


def test_nothing_named_needs_nothing() -> None:
    check_files(MODEL, ServerSection())


def test_a_template_that_is_not_there() -> None:
    model = ModelSection(path="m", served_names=("m",), chat_template="/nowhere.jinja")
    with pytest.raises(UsageError, match=r"--chat-template /nowhere.jinja cannot be read: No such file"):
        check_files(model, ServerSection())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{% if", b"x" * (2 << 20)])
def test_a_template_that_cannot_be_one_is_the_user_s_mistake(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.jinja"
    path.write_bytes(content)
    model = ModelSection(path="m", served_names=("m",), chat_template=str(path))
    with pytest.raises(UsageError, match=r"--chat-template.*own\.jinja") as caught:
        check_files(model, ServerSection())
    assert ".." not in caught.value.explain()


def test_a_pair_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    first, second = make_pair(tmp_path, "first"), make_pair(tmp_path, "second")
    check_files(MODEL, first)
    with pytest.raises(UsageError, match="cannot be used"):
        check_files(MODEL, ServerSection(tls_cert=first.tls_cert, tls_key=second.tls_key))


def test_rubbish_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("rubbish")
    with pytest.raises(UsageError, match="cannot be used"):
        check_files(MODEL, ServerSection(tls_cert=str(tmp_path / "x"), tls_key=str(tmp_path / "x")))


def test_a_key_with_a_passphrase_does_not_make_the_server_ask(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="asks for a passphrase"):
        check_files(MODEL, make_pair(tmp_path, "locked", passphrase="secret"))
