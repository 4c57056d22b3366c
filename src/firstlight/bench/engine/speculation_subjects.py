"""What `bench speculation` compares: an engine in this process, or any OpenAI-compatible server beside it.

Invariant: both are timed alike, from when every prompt of a batch has its first token, so that prompts are
not counted.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from firstlight.base.config import EngineSection
from firstlight.base.draft_tree import MOST_NODES, check_tree
from firstlight.base.errors import UsageError
from firstlight.bench.measures import RequestRecord
from firstlight.bench.serving.completions import PATHS
from firstlight.bench.serving.http_client import HttpClient
from firstlight.bench.serving.load import closed_loop
from firstlight.bench.serving.serving import Sender, first_model
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.metrics import DraftCounts, figures
from firstlight.engine.speculation.shape import NOTHING, Shape

WITHOUT = "none"
_TIMEOUT_S = 600.0
_START_S = 60.0


@dataclass(frozen=True)
class Asked:
    """A prompt, and how many tokens its answer has."""

    tokens: list[int]
    num_answer: int


def parse_tree(text: str) -> Shape:
    """A tree of "3x4x16": its depth, top-k and nodes. Raises a `UsageError` for anything else."""
    hint = "Give depth, top-k and nodes: --tree 3x4x16."
    try:
        depth, top_k, nodes = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise UsageError(f"--tree {text!r} is no tree.", hint) from error
    if depth < 1 or top_k < 2 or not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"--tree {text!r} needs a depth, a top-k from 2 and 1 to {MOST_NODES} nodes.", hint)
    check_tree(EngineSection(draft_tokens=depth, draft_top_k=top_k, draft_nodes=nodes))
    return Shape(depth, top_k, nodes)


class Subject(ABC):
    """One that is compared, and what it has done so far in one group at one batch size."""

    def __init__(self, drafter: str, shape: Shape) -> None:
        self.drafter, self.shape = drafter, shape
        self.speeds: list[float] = []
        self.answers: list[list[int]] = []

    @property
    def name(self) -> str:
        shape = self.shape
        tree = f" top-k={shape.top_k} nodes={shape.nodes}" if shape.is_tree else ""
        return f"{self.drafter} k={shape.depth}{tree}" if shape.depth else self.drafter

    @property
    def drafts(self) -> dict[str, Any]:
        """See `figures`."""
        return figures(DraftCounts())

    def forget(self) -> None:
        """A new group or batch size begins."""
        self.speeds, self.answers = [], []

    @abstractmethod
    def answer(self, asked: Sequence[Asked], *, ignore_eos: bool = True) -> float:
        """Answers all of them together; tokens a second from when every one has its first token."""

    @abstractmethod
    def close(self) -> None:
        """The comparison is over."""


class Engine(Subject):
    """An engine in this process. `times_s` as `measure_step_times` gave them."""

    def __init__(self, drafter: str, shape: Shape, core: EngineCore, times_s: Mapping[int, float]):
        super().__init__(drafter, shape)
        self._core, self.times_s = core, times_s

    @property
    def drafts(self) -> dict[str, Any]:
        return super().drafts if self._core.speculation is None else figures(self._core.speculation.counts)

    def forget(self) -> None:
        """Also what the engine has learnt of acceptance."""
        super().forget()
        self._core.begin(self.times_s)

    def answer(self, asked: Sequence[Asked], *, ignore_eos: bool = True) -> float:
        """See `Subject`; also keeps the answers."""
        for number, one in enumerate(asked):
            params = SamplingParams(temperature=0.0, max_tokens=one.num_answer, ignore_eos=ignore_eos, seed=0)
            self._core.handle(Submit(str(number), one.tokens, params))
        answers: list[list[int]] = [[] for _ in asked]
        started_s: float | None = None
        timed = 0
        while self._core.has_work:
            outputs = self._core.step()
            for output in outputs.outputs if outputs is not None else []:
                answers[int(output.request_id)] += output.token_ids
                timed += len(output.token_ids) if started_s is not None else 0
            if started_s is None and all(answers):
                started_s = perf_counter()
        assert started_s is not None, "a request was given no token"
        self.answers += answers
        return timed / (perf_counter() - started_s)

    def close(self) -> None:
        pass


class Server(Subject):
    """A server at a URL, asked with the same token ids over HTTP."""

    def __init__(self, url: str) -> None:
        super().__init__(url, NOTHING)
        self._runner = asyncio.Runner()
        self._client = HttpClient(url)
        self._sender = Sender(self._client, PATHS["completions"], _TIMEOUT_S)
        self._model = self._runner.run(first_model(self._client, None, _START_S))

    def answer(self, asked: Sequence[Asked], *, ignore_eos: bool = True) -> float:
        """See `Subject`. Raises `UsageError` where an answer fails."""
        bodies = [self._body(one, ignore_eos=ignore_eos) for one in asked]
        records = self._runner.run(closed_loop(bodies, len(bodies), self._sender.send, lambda record: None))
        return _speed(self.drafter, records)

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def _body(self, one: Asked, *, ignore_eos: bool) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": one.tokens,
                "max_tokens": one.num_answer,
                "temperature": 0.0,
                "ignore_eos": ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def _speed(url: str, records: Sequence[RequestRecord]) -> float:
    """Raises `UsageError` where the server did not answer, or too shortly to be timed."""
    for record in records:
        if record.error is not None:
            raise UsageError(f"{url} gave no answer: {record.error}", "Check --beside, and the server's log.")
    started_s = max((record.text_times_s or (record.ended_s,))[0] for record in records)
    timed = 0.0
    for record in records:
        # A chunk may carry several tokens.
        tokens_each = record.num_output_tokens / max(1, len(record.text_times_s))
        timed += tokens_each * sum(time_s > started_s for time_s in record.text_times_s)
    seconds = max(record.ended_s for record in records) - started_s
    if not timed or seconds <= 0.0:
        raise UsageError(f"{url} gave no second token.", "Give more --tokens.")
    return timed / seconds
