"""The order of a launch, up to the first child."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from firstlight.base.errors import ModelFileError
from firstlight.base.resolve import Given, resolve
from firstlight.launch.serve import Order, serve


def order(tmp_path: Path) -> Order:
    given = Given({"uds": str(tmp_path / "public.sock")}, "the flags")
    return Order(resolved=resolve([given], 1), model="some/model", cores=(0,))


def test_the_socket_listens_before_the_model_is_looked_for(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def locate(model: str | None) -> Path:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "public.sock"))
        seen.append(model)
        raise ModelFileError("there is no such model")

    with pytest.raises(ModelFileError):
        serve(order(tmp_path), locate, io.StringIO())
    assert seen == ["some/model"]
    assert list(tmp_path.iterdir()) == []
