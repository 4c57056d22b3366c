"""What crosses between processes comes back equal: messages, plans, and the sockets that carry them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from firstlight.base.errors import EngineError, RequestError
from firstlight.engine.channel import (
    SEND_DEADLINE_MS,
    START_DEADLINE_MS,
    PlanReceiver,
    PlanSender,
    RequestChannel,
)
from firstlight.engine.messages import (
    OUTPUTS_SOCKET,
    REQUESTS_SOCKET,
    Abort,
    Drain,
    EngineStats,
    Failed,
    FromEngine,
    Ready,
    SequenceOutput,
    StepOutputs,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan, decode_plan, encode_plan

PARAMS = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, frequency_penalty=-0.5,
    presence_penalty=0.5, logit_bias={7: -1.5, 9: 2.0}, seed=2**63 - 1, stop=("a", "ß"),
    stop_token_ids=(3, 4), min_tokens=1, max_tokens=9, ignore_eos=True, logprobs=0,
)  # fmt: skip
TO_ENGINE: list[ToEngine] = [
    Submit("a", [1, 2, 2**31 - 1], PARAMS, priority=-3),
    Submit("b", [], SamplingParams()),
    Abort(["a", "b"]),
    Drain(2.5),
]
FROM_ENGINE: list[FromEngine] = [
    StepOutputs(
        [
            SequenceOutput("a", [5], [TokenLogprobs(5, -0.25, 1, [(5, -0.25), (6, -2.0)])], None, None, 16),
            SequenceOutput("b", [], None, "rejected", None, 0, "why"),
            SequenceOutput("c", [2], None, "stop", 2),
        ],
        EngineStats(num_running=3, step_s=0.25),
    ),
    Ready(8192, 49152, {"backend": "cpu", "notes": ["a", "b"], "start_s": 0.5}),
    Failed("message", "hint", 5),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_to_the_engine_come_back_equal(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_from_the_engine_come_back_equal(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x80", b"\x81\xa4type\xa4nope", b"\xff" * 40])
def test_bytes_that_are_no_message_are_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_to_engine(frame)


def test_a_plan_comes_back_equal() -> None:
    plan = StepPlan(7, [0, 3], [10, 0], [1, 3], [5, 1, 2, 3], [0], [(0, 2, [9]), (3, 0, [4, 5])])
    assert decode_plan(encode_plan(plan)) == plan
    assert plan.num_tokens == 4
    plan.trees, plan.moves = [(1, [-1, -1])], ([40, 41], [38, 39])
    assert decode_plan(encode_plan(plan)) == plan


OUT_OF_RANGE = {
    "temperature": (-0.1, 101.0, math.nan),
    "top_k": (-1,),
    "top_p": (0.0, 1.01, math.nan),
    "min_p": (-0.01, 1.1),
    "repetition_penalty": (0.0, -1.0, math.inf),
    "frequency_penalty": (-2.1, 2.1),
    "presence_penalty": (-2.1, 2.1, math.nan),
    "min_tokens": (-1,),
    "max_tokens": (0, -5),
    "seed": (2**63, -(2**63)),
    "logprobs": (-1, 5000),
    "logit_bias": ({1: 101.0}, {1: math.nan}, dict.fromkeys(range(1025), 0.0)),
    "stop_token_ids": (tuple(range(65)),),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OUT_OF_RANGE.items() for v in values])
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_more_minimum_than_maximum_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(5\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


# --- sockets ---


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a Unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield Path(folder)


class Peer:
    """The api process's ends."""

    def __init__(self, run_dir: Path) -> None:
        self.context = zmq.Context()
        self.requests = self.context.socket(zmq.PUSH)
        self.outputs = self.context.socket(zmq.PULL)
        self.outputs.setsockopt(zmq.RCVTIMEO, 10_000)
        self.requests.connect(f"ipc://{run_dir / REQUESTS_SOCKET}")
        self.outputs.connect(f"ipc://{run_dir / OUTPUTS_SOCKET}")

    def close(self) -> None:
        self.requests.close(0)
        self.outputs.close(0)
        self.context.term()


def test_the_request_channel_carries_both_ways(run_dir: Path) -> None:
    channel, peer = RequestChannel(run_dir), Peer(run_dir)
    try:
        assert channel.receive(wait=False) == []
        for message in TO_ENGINE:
            peer.requests.send(encode(message))
        received = channel.receive(wait=True)
        while len(received) < len(TO_ENGINE):
            received += channel.receive(wait=True)
        assert received == TO_ENGINE
        for message in FROM_ENGINE:
            channel.send(message)
        assert [decode_from_engine(peer.outputs.recv()) for _ in FROM_ENGINE] == FROM_ENGINE
    finally:
        peer.close()
        channel.close()


def test_an_offer_without_a_peer_is_dropped_and_does_not_wait(run_dir: Path) -> None:
    channel = RequestChannel(run_dir)
    channel.offer(Failed("gone", "", 6))
    channel.close()


def test_nobody_takes_a_message_within_its_own_deadline(run_dir: Path) -> None:
    """The first message waits for the imports of the api process, all others for a process that is there."""
    channel = RequestChannel(run_dir)
    with pytest.raises(EngineError, match="took no message for 0 s"):
        channel.send(Failed("message", "hint", 5), 10)
    channel.close()


class Watched:
    """A socket that remembers which options were set."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.options = socket, list[tuple[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def setsockopt(self, option: int, value: int) -> None:
        self.options.append((option, value))
        self.socket.setsockopt(option, value)


def test_a_deadline_of_one_message_is_not_the_next_one_s_and_no_step_sets_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = RequestChannel(run_dir), Peer(run_dir)
    watched = Watched(channel._outputs)
    monkeypatch.setattr(channel, "_outputs", watched)
    message = Failed("message", "hint", 5)
    try:
        assert watched.getsockopt(zmq.SNDTIMEO) == SEND_DEADLINE_MS
        channel.send(message, START_DEADLINE_MS)
        for _ in range(5):
            channel.send(message)
        assert watched.options == [(zmq.SNDTIMEO, START_DEADLINE_MS), (zmq.SNDTIMEO, SEND_DEADLINE_MS)]
        channel.offer(message)
        channel.send(message)
        assert watched.getsockopt(zmq.SNDTIMEO) == SEND_DEADLINE_MS
    finally:
        peer.close()
        channel.close()


def test_plans_reach_every_rank_in_order_and_then_the_end(run_dir: Path) -> None:
    receivers = [PlanReceiver(run_dir, rank) for rank in (1, 2)]
    sender = PlanSender(run_dir, 3)
    plans = [StepPlan(step, [0], [step], [1], [5], [0], []) for step in range(3)]
    for plan in plans:
        sender.send(plan)
    sender.close()
    for receiver in receivers:
        assert [receiver.receive() for _ in range(4)] == [*plans, None]
        receiver.close()


def test_a_single_rank_sends_no_plans(run_dir: Path) -> None:
    sender = PlanSender(run_dir, 1)
    sender.send(StepPlan(0, [0], [0], [1], [5], [0], []))
    sender.close()
