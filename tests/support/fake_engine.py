"""An engine for tests of the api process: real sockets, scripted tokens, no model.

It answers a `Submit` with the tokens of its script, one a step, and the end of a profile with an empty one;
it records every message. Invariant: what a
test waits for has a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from firstlight.engine.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_REJECTED,
    FINISH_STOP,
    OUTPUTS_SOCKET,
    REQUESTS_SOCKET,
    Abort,
    Drain,
    EngineStats,
    FromEngine,
    Profile,
    Ready,
    SequenceOutput,
    StepOutputs,
    StopProfile,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    encode,
)

DEADLINE_S = 10.0
STEP_S = 0.001  # a step of a sequence without end; others go as fast as they can


EMPTY_PROFILE = Profile(
    num_ranks=1,
    num_steps=0,
    num_plain_steps=0,
    num_other_steps=0,
    window_s=1.0,
    other_s=0.0,
    idle_s=1.0,
    overhead=None,
    groups=[],
)


@dataclass
class Script:
    """What a submitted sequence gets. `end_id`: the last token, which ends it if the limit does not."""

    tokens: list[int] = field(default_factory=list)
    end_id: int | None = None
    repeat: bool = False  # go on from the first token for ever
    held: bool = False  # no token before `FakeEngine.release`
    reject: str | None = None
    num_cached: int = 0


@dataclass
class _Running:
    submit: Submit
    script: Script
    num_sent: int = 0


class FakeEngine:
    """`script(submit)` decides what each sequence gets. Runs in its own thread from `start` to `stop`."""

    def __init__(self, run_dir: Path, script: Callable[[Submit], Script], vocab_size: int = 300) -> None:
        self.sizes = (256 if vocab_size <= 300 else 4096, vocab_size)  # longest sequence, vocabulary
        self._run_dir = run_dir
        self._script = script
        self._received: list[ToEngine] = []
        self._news = threading.Condition()
        self._to_send: list[FromEngine] = []
        self._released = threading.Event()
        self._stop = threading.Event()
        self._running: dict[str, _Running] = {}
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)

    def start(self, *, ready: bool = True) -> FakeEngine:
        if ready:
            self.send(Ready(*self.sizes, {"layout": "none"}))
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def send(self, message: FromEngine) -> None:
        """Sends something of the test's own."""
        with self._news:
            self._to_send.append(message)

    def release(self) -> None:
        """Lets held sequences go on."""
        self._released.set()

    def received(self, kind: type[ToEngine]) -> list[ToEngine]:
        with self._news:
            return [message for message in self._received if isinstance(message, kind)]

    def wait_for(self, kind: type[ToEngine], count: int = 1) -> list[ToEngine]:
        """The messages of a kind, once there are `count` of them."""
        with self._news:
            there = self._news.wait_for(
                lambda: sum(isinstance(m, kind) for m in self._received) >= count, DEADLINE_S
            )
        assert there, f"no {kind.__name__} within {DEADLINE_S} s"
        return self.received(kind)

    def wait_until_idle(self) -> None:
        """Until no sequence runs."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._running:
            assert time.monotonic() < deadline_s, f"still running: {list(self._running)}"
            time.sleep(0.005)

    def _run(self) -> None:
        context = zmq.Context()
        requests = context.socket(zmq.PULL)
        requests.bind(f"ipc://{self._run_dir / REQUESTS_SOCKET}")
        outputs = context.socket(zmq.PUSH)
        outputs.setsockopt(zmq.LINGER, 200)
        outputs.setsockopt(zmq.SNDTIMEO, 200)
        outputs.bind(f"ipc://{self._run_dir / OUTPUTS_SOCKET}")
        try:
            while not self._stop.is_set():
                with contextlib.suppress(zmq.Again):  # the api process is gone
                    self._turn(requests, outputs)
        finally:
            requests.close(0)
            outputs.close()
            context.term()

    def _turn(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        if requests.poll(0 if self._running else 5):
            self._take(decode_to_engine(requests.recv()))
        while self._to_send:
            outputs.send(encode(self._to_send[0]))
            with self._news:
                del self._to_send[0]
        step = self._step()
        if step:
            if any(running.script.repeat for running in self._running.values()):
                time.sleep(STEP_S)
            self._num_steps += 1
            stats = EngineStats(num_running=len(self._running), num_steps=self._num_steps, step_s=0.001)
            outputs.send(encode(StepOutputs(step, stats)))

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._running[message.request_id] = _Running(message, self._script(message))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                if self._running.pop(request_id, None):
                    self.send(_ended(SequenceOutput(request_id, [], finish_reason=FINISH_ABORT)))
        elif isinstance(message, StopProfile):
            self.send(EMPTY_PROFILE)
        elif isinstance(message, Drain) and message.deadline_s == 0:
            for request_id in self._running:
                self.send(_ended(SequenceOutput(request_id, [], finish_reason=FINISH_ABORT)))
            self._running.clear()
        with self._news:
            self._received.append(message)
            self._news.notify_all()

    def _step(self) -> list[SequenceOutput]:
        outputs = [
            self._next(running)
            for running in list(self._running.values())
            if not running.script.held or self._released.is_set()
        ]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        return outputs

    def _next(self, running: _Running) -> SequenceOutput:
        script, request_id = running.script, running.submit.request_id
        if script.reject is not None:
            return SequenceOutput(request_id, [], finish_reason=FINISH_REJECTED, error=script.reject)
        position, params = running.num_sent, running.submit.params
        running.num_sent += 1
        at_end = position >= len(script.tokens) and not script.repeat
        token = script.tokens[position % len(script.tokens)] if not at_end else script.end_id
        assert token is not None, "the script has no end"
        reason, stop_id = None, None
        if at_end:
            reason, stop_id = FINISH_STOP, token
        elif params.max_tokens is not None and running.num_sent >= params.max_tokens:
            reason = FINISH_LENGTH
        logprobs = None
        if params.logprobs is not None:
            top = [(token, -0.5), *((token + 1 + i, -1.0 - i) for i in range(params.logprobs - 1))]
            logprobs = [TokenLogprobs(token, -0.5, 1, top[: params.logprobs])]
        return SequenceOutput(request_id, [token], logprobs, reason, stop_id, script.num_cached)


def _ended(output: SequenceOutput) -> StepOutputs:
    return StepOutputs([output], EngineStats())
