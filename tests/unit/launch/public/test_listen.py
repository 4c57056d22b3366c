"""The public socket: taken ports, free ports, Unix sockets."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from firstlight.base.config import ServerSection
from firstlight.base.errors import ResourceError, UsageError
from firstlight.launch.public.listen import bound_port, listen


def test_a_free_port_is_found_and_connections_are_held_before_anyone_accepts() -> None:
    with listen(ServerSection(port=0)) as listener:
        port = bound_port(listener)
        assert port > 0
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_taken_port_is_a_resource_error_with_a_way_out() -> None:
    with listen(ServerSection(port=0)) as listener:
        taken = bound_port(listener)
        with pytest.raises(ResourceError, match=rf"127\.0\.0\.1:{taken}: the port is taken") as caught:
            listen(ServerSection(port=taken))
    assert "--port" in caught.value.hint
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_an_address_that_is_not_ours_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match=host):
        listen(ServerSection(host=host, port=0))


def test_a_unix_socket_is_private_to_user_and_group(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen(ServerSection(uds=str(path))) as listener:
        assert bound_port(listener) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_stale_unix_socket_is_replaced_but_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = ServerSection(uds=str(path))
    listen(server).close()
    assert path.exists()
    with listen(server), pytest.raises(ResourceError, match="another server"):
        listen(server)


def test_a_file_is_never_replaced_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("keep me")
    with pytest.raises(ResourceError, match="is not a socket"):
        listen(ServerSection(uds=str(path)))
    assert path.read_text() == "keep me"


def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="too long"):
        listen(ServerSection(uds=str(tmp_path / ("x" * 120))))
