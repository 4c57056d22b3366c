"""An engine of real rank processes, driven over its sockets as the api process would.

Used by the tests of tensor parallelism and of dying ranks. Every wait has a deadline, and leaving the `with`
block ends all processes that are left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection, write_config
from firstlight.engine.messages import (
    OUTPUTS_SOCKET,
    REQUESTS_SOCKET,
    Drain,
    Failed,
    FromEngine,
    Ready,
    SequenceOutput,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)

SOURCES = Path(__file__).parents[2] / "src"
DEADLINE_S = 90.0


class RankProcesses:
    """`ready` is the engine's first word after its start."""

    def __init__(self, model: str | Path, num_ranks: int, *, dtype: str = "float32", **section: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fl-")
        self.run_dir = Path(self._folder.name)  # short: a Unix socket's path may have 107 bytes
        sizes = {"tensor_parallel": num_ranks, "threads": 1, "kv_memory_bytes": 2**26, **section}
        config = RunConfig(
            run_dir=str(self.run_dir),
            model=ModelSection(path=str(model), served_names=("test",), dtype=dtype),
            engine=EngineSection(**sizes),
            server=ServerSection(),
        )
        write_config(config)
        self._context = zmq.Context()
        self._requests = self._socket(zmq.PUSH, REQUESTS_SOCKET)
        self._outputs = self._socket(zmq.PULL, OUTPUTS_SOCKET)
        environment = os.environ | {"PYTHONPATH": str(SOURCES)}
        command = [sys.executable, "-m", "firstlight.engine.rank", "--run-dir", str(self.run_dir)]
        self.processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(num_ranks)
        ]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._requests.close(0)
        self._outputs.close(0)
        self._context.term()
        self._folder.cleanup()

    def wait_until_ready(self) -> Ready:
        while True:
            message = self.receive()
            if isinstance(message, Ready):
                return message
            raise AssertionError(message)

    def send(self, message: ToEngine) -> None:
        self._requests.send(encode(message))

    def receive(self) -> FromEngine:
        assert self._outputs.poll(DEADLINE_S * 1000), "the engine said nothing for too long"
        return decode_from_engine(self._outputs.recv())

    def run(self, submits: Iterable[Submit]) -> dict[str, list[SequenceOutput]]:
        """Outputs of all requests, to their ends."""
        items = list(submits)
        for item in items:
            self.send(item)
        return self._collect({item.request_id for item in items})

    def outputs_until_end(self, request_id: str) -> list[SequenceOutput]:
        """Outputs of a request that was sent before."""
        return self._collect({request_id})[request_id]

    def _collect(self, open_ids: set[str]) -> dict[str, list[SequenceOutput]]:
        outputs: dict[str, list[SequenceOutput]] = {}
        while open_ids:
            message = self.receive()
            assert not isinstance(message, Failed), message
            for output in getattr(message, "outputs", []):
                outputs.setdefault(output.request_id, []).append(output)
                if output.finish_reason is not None:
                    open_ids.remove(output.request_id)
        return outputs

    def until_failed(self) -> Failed:
        """The last word of an engine that cannot go on."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            message = self.receive()
            if isinstance(message, Failed):
                return message
        raise AssertionError("the engine did not fail")

    def drain(self) -> list[int]:
        """Ends the engine as the launcher does; the exit codes of all ranks."""
        self.send(Drain(5.0))
        return [process.wait(DEADLINE_S) for process in self.processes]

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.connect(f"ipc://{self.run_dir / name}")
        return socket


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: list[SequenceOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs or []]
