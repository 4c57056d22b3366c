"""The supervisor's socket for the doctor: who is answered, and what a bad question does."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from firstlight.base.failure import Failure
from firstlight.doctor.servers.supervisor_socket import SOCKET_FILE, VERDICT, ask_supervisor
from firstlight.launch.events import Stalled
from firstlight.launch.processes import doctor_socket
from firstlight.launch.processes.doctor_socket import DoctorSocket
from firstlight.launch.verdict import Verdict

STOPPED = Failure("rank 0 is stopped.", "let it go on.", 6)
STALLED = Verdict(6, STOPPED, stall=Stalled(STOPPED, "rank-0"))


def ask_raw(run_dir: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(run_dir / SOCKET_FILE))
        connection.sendall(data)
        return connection.makefile("rb").read()


def test_the_latest_verdict_is_told(tmp_path: Path) -> None:
    verdicts: list[Verdict | None] = [None]
    server = DoctorSocket(tmp_path, lambda: verdicts[0])
    try:
        assert stat.S_IMODE((tmp_path / SOCKET_FILE).stat().st_mode) == 0o600
        assert ask_supervisor(tmp_path, VERDICT, 10).verdict is None
        verdicts[0] = STALLED
        said = ask_supervisor(tmp_path, VERDICT, 10).verdict
        assert said is not None
        assert (said.message, said.hint, said.subject) == ("rank 0 is stopped.", "let it go on.", "rank-0")
    finally:
        server.close()
    assert not (tmp_path / SOCKET_FILE).exists()
    with pytest.raises(OSError, match="No such file"):
        ask_supervisor(tmp_path, VERDICT, 1)


@pytest.mark.parametrize("data", [b"x\n", b"{}\n", b'{"what": "kill"}\n', b"[" * 4000 + b"\n"])
def test_what_is_no_question_is_refused(data: bytes, tmp_path: Path) -> None:
    server = DoctorSocket(tmp_path, lambda: None)
    try:
        assert b"not understood" in ask_raw(tmp_path, data)
        assert ask_supervisor(tmp_path, VERDICT, 10).verdict is None
    finally:
        server.close()


def test_a_long_question_and_a_silent_one_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_socket, "_DEADLINE_S", 0.2)
    server = DoctorSocket(tmp_path, lambda: None)
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(tmp_path / SOCKET_FILE))
            assert ask_supervisor(tmp_path, VERDICT, 10).verdict is None
        with socket.socket(socket.AF_UNIX) as long:
            long.connect(str(tmp_path / SOCKET_FILE))
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                long.sendall(b"x" * (64 << 20))
        assert ask_supervisor(tmp_path, VERDICT, 10).verdict is None
    finally:
        server.close()


def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_socket, "peer_uid", lambda _: os.geteuid() + 1)
    server = DoctorSocket(tmp_path, lambda: None)
    try:
        with pytest.raises(PermissionError, match="another user"):
            ask_supervisor(tmp_path, VERDICT, 10)
    finally:
        server.close()


def test_the_kernel_says_who_asks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert doctor_socket.peer_uid(ours) == os.geteuid()


def test_an_answer_that_never_ends_is_given_up(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / SOCKET_FILE))
        listener.listen()
        held: list[socket.socket] = []
        thread = threading.Thread(target=lambda: held.append(listener.accept()[0]), daemon=True)
        thread.start()
        start_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ask_supervisor(tmp_path, VERDICT, 0.3)
        assert time.monotonic() - start_s < 5
        thread.join(5)
        held[0].close()


def test_a_path_that_is_too_long_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    DoctorSocket(folder, lambda: None).close()
