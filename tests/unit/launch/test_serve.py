"""The order of a launch, up to the first child."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from firstlight.base.errors import ModelFileError
from firstlight.base.resolve_config import Given, resolve
from firstlight.launch.serve import Order, serve


def order(tmp_path: Path) -> Order:
    given = Given({"uds": str(tmp_path / "public.sock")}, "the flags")
    return Order(resolved=resolve([given], 1), model="some/model", cores=(0,))


def test_the_socket_listens_before_the_model_is_looked_for(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def locate(model: str | None) -> Path:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "public.sock"))
        seen.write_text(str(model))  # it runs in a child
        raise ModelFileError("there is no such model")

    with pytest.raises(ModelFileError):
        serve(order(tmp_path), locate, io.StringIO())
    assert seen.read_text() == "some/model"
    seen.unlink()
    assert list(tmp_path.iterdir()) == []


def test_what_headers_tell_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr("firstlight.launch.serve.make_run_directory", forbidden)
    model = tmp_path / "model"
    model.mkdir()
    (model / "pytorch_model.bin").touch()
    screen = io.StringIO()
    with pytest.raises(ModelFileError, match="pickle"):
        serve(order(tmp_path), lambda _: model, screen)
    assert screen.getvalue() == ""
