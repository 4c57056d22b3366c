"""Asking a living supervisor for what only it may see: the stacks of its ranks, and its own verdict.

The doctor's side of the socket in a run directory, and the messages of both sides; the other side is
`launch.processes.doctor_socket`. One line of JSON each way. Invariant: whoever listens there, an answer is
bounded in size and time.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final, Literal

import msgspec

from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_process import PythonStacks

SOCKET_FILE = "doctor.sock"
MAX_ASK_BYTES = 4096
MAX_ANSWER_BYTES = 16 * 2**20
STACKS: Final = "stacks"
VERDICT: Final = "verdict"


class Ask(msgspec.Struct, frozen=True):
    """A question."""

    what: Literal["stacks", "verdict"]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's verdict on a run that stands still or is lost."""

    message: str
    hint: str
    subject: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`stacks` by process key. `verdict` None: it has none, all is well. `error`: why it was refused.

    `status`: what the public port says of the run: starting, ready, stopping, lost or failed.
    """

    stacks: dict[str, PythonStacks | Failed] = {}
    verdict: Said | None = None
    status: str = ""
    error: str = ""


def ask_supervisor(run_dir: str | Path, what: Literal["stacks", "verdict"], deadline_s: float) -> Answer:
    """The answer. Raises `OSError` when nobody answers in time, or something that is no answer."""
    until_s = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline_s)
        connection.connect(str(Path(run_dir) / SOCKET_FILE))
        connection.sendall(msgspec.json.encode(Ask(what)) + b"\n")
        data = read_line(connection, MAX_ANSWER_BYTES, until_s)
    try:
        answer = msgspec.json.decode(data, type=Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise OSError(f"the supervisor's answer was not understood: {error}") from error
    if answer.error:
        raise PermissionError(f"the supervisor refused: {answer.error}")
    return answer


def read_line(connection: socket.socket, max_bytes: int, until_s: float) -> bytes:
    """A line without its end. Raises `OSError` when it is too long, too late, or not ended."""
    received = bytearray()
    while b"\n" not in received:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole line in time")
        connection.settimeout(left_s)
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("closed in the middle of a line")
        received += data
        if len(received) > max_bytes:
            raise OSError(f"a line of more than {max_bytes} bytes")
    return bytes(received.partition(b"\n")[0])
