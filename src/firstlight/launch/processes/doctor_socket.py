"""The supervisor's side of `doctor.sock`: stacks of its ranks for a doctor that may not take them itself.

A rank lets its supervisor trace it, so py-spy works from here where it is refused to others of the same user.
Invariants: only our own user is answered; one question at a time, each bounded in size and time; the engine's
supervision never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_process import PythonStacks
from firstlight.doctor.servers.supervisor_socket import (
    MAX_ASK_BYTES,
    SOCKET_FILE,
    STACKS,
    Answer,
    Ask,
    Said,
    read_line,
)
from firstlight.launch.verdict import Verdict

_DEADLINE_S = 2.0  # for a question to arrive, and for an answer to be taken
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_BACKLOG = 4


class DoctorSocket:
    """Answers from now until it is closed. `verdict` and `status` are the supervisor's, from any thread."""

    def __init__(
        self, run_dir: Path, verdict: Callable[[], Verdict | None], status: Callable[[], str] = lambda: ""
    ) -> None:
        self._run_dir = run_dir
        self._verdict, self._status = verdict, status
        self._path = run_dir / SOCKET_FILE
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._is_closed = False
        try:
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)  # the folder is ours alone already
            self._listener.listen(_BACKLOG)
        except OSError:  # a long path, a full disk: the run goes on without it
            self._is_closed = True
            self._listener.close()
            return
        threading.Thread(target=self._run, name="doctor-socket", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # out of descriptors: they come back
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_DEADLINE_S)
                connection.sendall(msgspec.json.encode(self._answer(connection)) + b"\n")

    def _answer(self, connection: socket.socket) -> Answer:
        # Read in any case: who is refused before it has asked sees a broken pipe instead of the answer.
        data = read_line(connection, MAX_ASK_BYTES, time.monotonic() + _DEADLINE_S)
        if peer_uid(connection) not in (0, os.geteuid()):
            return Answer(error="another user")
        try:
            ask = msgspec.json.decode(data, type=Ask)
        except (msgspec.DecodeError, RecursionError):
            return Answer(error="not understood")
        if ask.what == STACKS:
            return Answer(stacks=self._stacks())
        return Answer(verdict=self._said(), status=self._status())

    def _said(self) -> Said | None:
        end = self._verdict()
        if end is None or end.failure is None:
            return None
        return Said(message=end.failure.message, hint=end.failure.hint, subject=end.subject)

    def _stacks(self) -> dict[str, PythonStacks | Failed]:
        from firstlight.doctor.collect.scene import Scene  # not before the first question
        from firstlight.doctor.collect.stacks import collect_stacks
        from firstlight.doctor.servers.discover import target_of_run

        scene = Scene(target_of_run(self._run_dir))
        return {
            seen.subject: seen.value
            for seen in collect_stacks(scene)
            if isinstance(seen.value, PythonStacks | Failed)
        }


def peer_uid(connection: socket.socket) -> int:
    """Whose process is at the other end, by the kernel's word."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
