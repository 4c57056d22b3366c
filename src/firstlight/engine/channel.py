"""The engine's ends of its sockets: requests in, outputs out, and plans from rank 0 to the other ranks.

ZeroMQ over ipc in the private run directory; one message a frame. Invariant: a send never waits forever: a
peer that does not read within the deadline is an error.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from firstlight.base.errors import EngineError
from firstlight.engine.messages import (
    OUTPUTS_SOCKET,
    REQUESTS_SOCKET,
    Abort,
    FromEngine,
    ToEngine,
    decode_to_engine,
    encode,
)
from firstlight.engine.scheduler.plan import Recording, StepPlan, decode_plan, encode_plan

SEND_DEADLINE_MS = 30_000
START_DEADLINE_MS = 300_000  # for the imports of the api process, on whatever machine
LAST_WORDS_DEADLINE_MS = 1_000
_LEAVE = b""  # sent instead of a plan: the run is over


class RequestChannel:
    """Rank 0's side towards the api process. Owns both sockets until `close`."""

    def __init__(self, run_dir: Path) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.RCVHWM, 0)  # the scheduler's queue has the limit
        self._requests_address = f"ipc://{run_dir / REQUESTS_SOCKET}"
        self._requests.bind(self._requests_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)
        self._outputs.setsockopt(zmq.LINGER, 1000)
        self._outputs.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
        self._deadline_ms = SEND_DEADLINE_MS
        self._outputs.bind(f"ipc://{run_dir / OUTPUTS_SOCKET}")

    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages that are there; with `wait`, at least one."""
        messages: list[ToEngine] = []
        if wait:
            messages.append(decode_to_engine(self._requests.recv()))
        while True:
            try:
                messages.append(decode_to_engine(self._requests.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine, deadline_ms: int = SEND_DEADLINE_MS) -> None:
        """Sends a message that must arrive. Raises `EngineError` if nobody takes it within the deadline."""
        self._set_deadline(deadline_ms)
        try:
            self._outputs.send(encode(message))
        except zmq.Again as error:
            raise EngineError(
                f"the api process took no message for {deadline_ms // 1000} s",
                "It stopped or died: look at its log in the run directory.",
            ) from error

    def offer(self, message: FromEngine) -> None:
        """Sends last words: a peer that is not there within a second does not get them."""
        self._set_deadline(LAST_WORDS_DEADLINE_MS)
        try:
            self._outputs.send(encode(message))
        except zmq.Again:
            return

    def wake(self) -> None:
        """Lets a waiting `receive` return; for other threads than the engine's."""
        with self._context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, LAST_WORDS_DEADLINE_MS)
            socket.connect(self._requests_address)
            socket.send(encode(Abort([])))

    def _set_deadline(self, deadline_ms: int) -> None:
        """Of the next message. Only the first and the last one have their own: a step sets no option."""
        if deadline_ms != self._deadline_ms:
            self._outputs.setsockopt(zmq.SNDTIMEO, deadline_ms)
            self._deadline_ms = deadline_ms

    def close(self) -> None:
        self._requests.close(0)
        self._outputs.close()
        self._context.term()


class PlanSender:
    """Rank 0's side towards the other ranks. There is no deadline here: an idle engine sends no plans."""

    def __init__(self, run_dir: Path, size: int) -> None:
        self._context = zmq.Context()
        self._sockets = [self._connect(_address(run_dir, rank)) for rank in range(1, size)]

    def send(self, plan: StepPlan | Recording) -> None:
        if self._sockets:
            self._send(encode_plan(plan))

    def close(self) -> None:
        """Tells the other ranks that the run is over."""
        self._send(_LEAVE)
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _send(self, frame: bytes) -> None:
        for socket in self._sockets:
            socket.send(frame)

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
        socket.connect(address)
        return socket


class PlanReceiver:
    """Another rank's side."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(_address(run_dir, rank))

    def receive(self) -> StepPlan | Recording | None:
        """The next plan or order; None when the run is over."""
        frame = self._socket.recv()
        return decode_plan(frame) if frame != _LEAVE else None

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def _address(run_dir: Path, rank: int) -> str:
    return f"ipc://{run_dir / f'plans-{rank}.sock'}"
