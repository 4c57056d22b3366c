"""The api process's end of the engine's sockets: submit, abort, and the answers sorted by request.

One task receives every message and puts new tokens into the mailbox of their HTTP request. Invariant: memory
a request holds here is bounded by its own tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from firstlight.base.errors import RequestError, as_sentence
from firstlight.engine.messages import (
    FINISH_ERROR,
    OUTPUTS_SOCKET,
    REQUESTS_SOCKET,
    Abort,
    Drain,
    EngineStats,
    Failed,
    Profile,
    Ready,
    SequenceOutput,
    StepOutputs,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from firstlight.engine.speculation.metrics import NO_STEP, DraftCounts
from firstlight.serve.engine_link.mailbox import Mailbox, OnOutput, pause_of
from firstlight.serve.engine_link.profile_order import ProfileOrder
from firstlight.serve.http.request_ids import is_called

LEAST_S = 10.0  # between two lines of the log on drafts


class DraftLog:
    """What the log says of drafts: how many are made now, and why, when that has changed.

    However often the engine changes its mind, a line every ten seconds at most; a step without a change costs
    two comparisons.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: tuple[int, int] | None = None
        self._said_s = 0.0

    def saw(self, counts: DraftCounts | None) -> None:
        """The counts of a step; None without a drafter."""
        if counts is None or (counts.now, counts.nodes_now) == self._said:
            return
        if counts.reason == NO_STEP:
            return  # a prompt at most has run
        now_s = self._clock()
        if self._said is not None and now_s - self._said_s < LEAST_S:
            return
        self._said, self._said_s = (counts.now, counts.nodes_now), now_s
        log.info("drafts of %s: %d of %d; %s", counts.drafter, counts.now, counts.most, counts.reason)


log = logging.getLogger(__name__)
LAST_WORDS_LOOKS, LAST_WORDS_LOOK_S = 20, 0.05


class EngineClient:
    """The engine as the api process sees it: its state, its latest figures, and its open sequences.

    `on_step` hears of every step, `on_failure` once of the engine's end. Must be started and used in one
    event loop.
    """

    def __init__(
        self,
        run_dir: str | Path,
        on_step: Callable[[EngineStats], None] | None = None,
        on_failure: Callable[[Failed], None] | None = None,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._on_step = on_step
        self._on_failure = on_failure
        self._boxes: dict[str, Mailbox] = {}
        self._groups: dict[str, list[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.is_draining = False
        self.stats = EngineStats()
        self._draft_log = DraftLog()
        self.profile = ProfileOrder(self._send)

    @property
    def is_serving(self) -> bool:
        """Whether new requests can be taken."""
        return self.ready is not None and self.failure is None and not self.is_draining

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._boxes)

    def start(self) -> None:
        """Connects and starts to receive; the engine may come later."""
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._requests.setsockopt(zmq.LINGER, 500)
        self._requests.connect(f"ipc://{self._run_dir / REQUESTS_SOCKET}")
        outputs = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        outputs.setsockopt(zmq.RCVHWM, 0)
        monitor = outputs.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outputs, self._monitor = outputs, monitor
        outputs.connect(f"ipc://{self._run_dir / OUTPUTS_SOCKET}")
        self._tasks = [
            asyncio.create_task(self._receive(outputs), name="engine outputs"),
            asyncio.create_task(self._watch(monitor), name="engine connection"),
        ]

    async def close(self) -> None:
        """Gives the sockets back. Open sequences end with an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_all("the server stops")
        self._outputs.disable_monitor()
        self._monitor.close(0)
        self._outputs.close(0)
        self._requests.close()
        self._context.term()

    def open(self, group: str, submits: Sequence[Submit], on_output: OnOutput | None = None) -> Mailbox:
        """Submits the sequences of one HTTP request. The caller must `close` the mailbox.

        Raises `RequestError` when the engine does not serve. `group`: an id that no other request has.
        """
        if not self.is_serving:
            raise self.unavailable()
        assert group not in self._groups, "ids are made unique"
        box = Mailbox(self, group, submits, on_output)
        self._groups[group] = [submit.request_id for submit in submits]
        for submit in submits:
            self._boxes[submit.request_id] = box
            self._send(submit)
        return box

    def pause_s(self) -> float:
        """What lies at least between two chunks of one answer: see `mailbox.pause_of`."""
        return pause_of(len(self._boxes))

    def cancel(self, name: str) -> bool:
        """Aborts an HTTP request by its id, or all with this x-request-id; their sequences end with the
        reason "abort". False if none runs."""
        meant = [ids for group, ids in self._groups.items() if is_called(group, name)]
        open_ids = [id_ for ids in meant for id_ in ids if id_ in self._boxes]
        if open_ids:
            self._send(Abort(open_ids))
        return bool(open_ids)

    def unavailable(self) -> RequestError:
        """Why the engine does not serve, and when to ask again."""
        if self.failure is not None:
            text = f"The engine failed: {as_sentence(self.failure.message)} {self.failure.hint}".strip()
            return _unavailable(text, "engine_failed", 10.0)
        if self.is_draining:
            message = "The server is shutting down and takes no new requests; ask another one, or come back."
            return _unavailable(message, "stopping", 5.0)
        return _unavailable("The model is not ready yet; /startup says how far it is.", "starting", 1.0)

    def drain(self, deadline_s: float) -> None:
        """Takes no new requests; tells the engine to finish what runs within `deadline_s`, then to leave."""
        self.is_draining = True
        if self.ready is not None and self.failure is None:
            self._send(Drain(deadline_s))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Aborts sequences nobody waits for any more."""
        ids = [id_ for id_ in request_ids if self._boxes.pop(id_, None) is not None]
        if ids:
            self._send(Abort(ids))

    def close_group(self, group: str) -> None:
        """The HTTP request is answered: its id is free again."""
        self._groups.pop(group, None)

    def refuse(self, failure: Failed) -> None:
        """The supervisor's verdict: open sequences end with it, new ones are refused with it."""
        self.failure = failure
        ids = list(self._boxes)
        self._end_all(failure.message)
        if ids:
            self._send(Abort(ids))  # an engine that moves again shall not work for nobody

    def resume(self) -> None:
        """The verdict is withdrawn."""
        self.failure = None

    def _send(self, message: ToEngine) -> None:
        self._requests.send(encode(message), zmq.NOBLOCK)

    async def _receive(self, outputs: zmq.asyncio.Socket) -> None:
        while True:
            frame = await outputs.recv()
            message = decode_from_engine(frame)
            match message:
                case StepOutputs():
                    self._dispatch(message)
                case Ready():
                    self.ready = message
                case Failed():
                    self._fail(message)
                case Profile():
                    self.profile.deliver(message)
            # A message that is there already is received without a pause; others want their turn too.
            await asyncio.sleep(0)

    def _dispatch(self, step: StepOutputs) -> None:
        self.stats = step.stats
        self._draft_log.saw(step.stats.drafts)
        if self._on_step is not None:
            self._on_step(step.stats)
        for output in step.outputs:
            box = self._boxes.get(output.request_id)
            if box is None:  # aborted a moment ago
                continue
            if output.finish_reason is not None:
                del self._boxes[output.request_id]
            box.deliver(output)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """The connection to the engine ends only when its process does."""
        await recv_monitor_message(monitor)
        if not self.is_draining:
            # Its last message may still be on its way, and so may what the supervisor has to say of its end.
            for _ in range(LAST_WORDS_LOOKS):
                if self.failure is not None:
                    break
                await asyncio.sleep(LAST_WORDS_LOOK_S)
            self._fail(Failed("the engine process ended", "Its log in the run directory says why.", 6))
        else:
            self._end_all("the engine ended before this request was finished")

    def _fail(self, failure: Failed) -> None:
        if self.failure is None:
            self.failure = failure
            log.error("the engine failed: %s", failure.message)
            if self._on_failure is not None:
                self._on_failure(failure)
        self._end_all(failure.message)

    def _end_all(self, error: str) -> None:
        self.profile.fail(error)
        for request_id, box in list(self._boxes.items()):
            del self._boxes[request_id]
            box.deliver(SequenceOutput(request_id, [], finish_reason=FINISH_ERROR, error=error))


def _unavailable(message: str, code: str, retry_after_s: float) -> RequestError:
    return RequestError(message, code=code, status=503, kind="server_error", retry_after_s=retry_after_s)
