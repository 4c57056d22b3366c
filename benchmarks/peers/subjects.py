"""An engine that is being measured: a server over HTTP, or a process that speaks JSON lines.

Used by `rounds`. Linux only. Invariant: after `close` nothing of it runs, and a load's report is made the
same way for both kinds.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import tempfile
import time
from typing import Any, Protocol

import msgspec

from firstlight.base.environment import child_environment
from firstlight.base.errors import EngineError
from firstlight.bench.measures import RequestRecord
from firstlight.bench.serving.completions import PATHS
from firstlight.bench.serving.server_process import CommandServer, process_tree, tree_pss_bytes
from firstlight.bench.serving.serving import ServingOrder, bench_serving
from firstlight.bench.serving.serving_report import Outcome, ServingReport, make_report
from peers.measures import ANSWER_TOKENS, Measure
from peers.settings import NAME, Setting

LAUNCH_S, ORDER_S = 600.0, 600.0
_FIRST = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
_ALONE = "Run the peer's command by itself; the other engines go on."


class Subject(Protocol):
    """What `rounds` needs of an engine."""

    def first_token_s(self) -> float:
        """Waits for the first token; seconds from the launch."""

    def load(self, measure: Measure, seed: int) -> ServingReport:
        """Carries out a load."""

    def answer(self, question: str) -> str:
        """Greedy, by the chat template."""

    def pss_bytes(self) -> int:
        """Of all its processes."""

    def pause(self) -> None:
        """Stops all its processes by a signal."""

    def go_on(self) -> None:
        """Undoes `pause`."""

    def close(self) -> None:
        """Ends it."""


def launch(setting: Setting) -> Subject:
    """Starts the engine of a setting; returns at once."""
    return DriverSubject(setting) if setting.is_driver else HttpSubject(setting)


class HttpSubject:
    """A server with the completion APIs of OpenAI. The client's cost is inside its figures."""

    def __init__(self, setting: Setting) -> None:
        self._server = CommandServer(setting.command, setting.variables)
        self._server.__enter__()

    def first_token_s(self) -> float:
        return self._server.wait_for_answer(PATHS["completions"], msgspec.json.encode(_FIRST), LAUNCH_S)

    def load(self, measure: Measure, seed: int) -> ServingReport:
        order = ServingOrder(
            url=self._server.url,
            model=NAME,
            prompts=measure.prompts,
            num_requests=measure.num_requests,
            output_tokens=measure.new_tokens,
            concurrency=measure.concurrency,
            num_warmup=0,
            seed=seed,
            timeout_s=ORDER_S,
        )
        return bench_serving(order)

    def answer(self, question: str) -> str:
        message = {"role": "user", "content": question}
        body = {"model": NAME, "messages": [message], "temperature": 0, "max_tokens": ANSWER_TOKENS}
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=ORDER_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", PATHS["chat"], msgspec.json.encode(body), headers)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise EngineError(f"a chat was answered {reply.status}: {content[:300]!r}", _ALONE)
        return chat_text(content)

    def pss_bytes(self) -> int:
        return self._server.pss_bytes()

    def pause(self) -> None:
        _signal(self._server.tree(), signal.SIGSTOP)

    def go_on(self) -> None:
        _signal(reversed(self._server.tree()), signal.SIGCONT)

    def close(self) -> None:
        self._server.__exit__(None, None, None)


class DriverSubject:
    """A process of `drivers/`."""

    def __init__(self, setting: Setting) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            setting.command,
            env=child_environment(setting.variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )

    def first_token_s(self) -> float:
        self._line(LAUNCH_S)
        return time.monotonic() - self._started_s

    def load(self, measure: Measure, seed: int) -> ServingReport:
        prompts = measure.prompts.make(measure.num_requests, seed, as_text=False)
        order = {"do": "complete", "prompts": prompts, "num_new": measure.new_tokens}
        reply = self._ask({**order, "concurrency": measure.concurrency})
        return report_of(reply, measure)

    def answer(self, question: str) -> str:
        return str(self._ask({"do": "chat", "question": question, "num_new": ANSWER_TOKENS})["text"])

    def pss_bytes(self) -> int:
        return tree_pss_bytes(self._process.pid)

    def pause(self) -> None:
        _signal(process_tree(self._process.pid), signal.SIGSTOP)

    def go_on(self) -> None:
        _signal(process_tree(self._process.pid), signal.SIGCONT)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        except OSError as error:
            raise EngineError(f"the driver is gone: {self._tail()}", _ALONE) from error
        reply: dict[str, Any] = msgspec.json.decode(self._line(ORDER_S))
        if "error" in reply:
            raise EngineError(f"the driver failed: {reply['error']}", _ALONE)
        return reply

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        line, end_s = b"", time.monotonic() + deadline_s
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise EngineError(f"no line in {deadline_s:.0f} s: {self._tail()}", _ALONE)
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EngineError(f"the driver ended: {self._tail()}", _ALONE)
            line += piece
        return line

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 1000, max(0, size - 1000)).decode(errors="replace").strip()


def chat_text(content: bytes) -> str:
    """The text of a chat completion."""
    return str(msgspec.json.decode(content)["choices"][0]["message"]["content"])


def report_of(reply: dict[str, Any], measure: Measure) -> ServingReport:
    """A driver's answer as the report that the client of `bench serving` would have made."""
    records = tuple(
        RequestRecord(
            started_s=0.0,
            ended_s=last_s,
            text_times_s=(first_s,),
            num_prompt_tokens=measure.prompt_tokens,
            num_output_tokens=num_tokens,
        )
        for first_s, last_s, num_tokens in reply["requests"]
    )
    outcome = Outcome(records=records, start_s=0.0, duration_s=reply["duration_s"], client_cpu_s=0.0)
    return make_report(outcome, model=NAME, api="in process", loop="closed", limits_ms={})


def _signal(pids: Any, number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
