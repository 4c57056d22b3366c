"""The engine at work with the drafter, and everything that it leaves on the way: drafts, states, acceptance.

The engine is stepped like any other; only its `execute` and its drafter's `propose` are listened to.
Invariant: what is taken down of a position is what its last step left, so that rejected drafts are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.base.config import EngineSection
from firstlight.drafter.explain.drafts import Proposal
from firstlight.drafter.explain.order import Order
from firstlight.engine.messages import SequenceOutput, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.places import slots_of
from firstlight.engine.worker.not_numbers import gave_up
from firstlight.engine.worker.startup import Started, quiet, start
from firstlight.ops.collectives import Group

MAX_SEQUENCES = 8
STATES_OF_A_TOKEN = 4  # that a drafter keeps beside the target's keys and values, at most


@dataclass
class Answered:
    """One request: its tokens, what was drafted for it, and the states [C, H] of its positions."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    proposals: dict[int, Proposal] = field(default_factory=dict)  # by the tokens that were known
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: torch.Tensor | None = None  # of its tokens from the second on, when it was drafted for last
    num_rounds: int = 0  # steps behind the one that gave the first token


class Listening:
    """Runs requests on a drafting engine."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._core = started.core(self._executed)
        self._answers: dict[str, Answered] = {}
        self._num_requests = 0
        drafter: Any = started.drafter
        self._propose = drafter.propose
        drafter.propose = self._heard
        self._core.begin({})

    def answer(
        self,
        prompts: list[list[int]],
        lengths: list[int],
        on_tokens: Callable[[int], None] = lambda num: None,
    ) -> list[Answered]:
        """Answers greedily, batched; each has so many tokens. `on_tokens` hears of each step's."""
        mine = []
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, seed=0)
            name = f"explain-{self._num_requests}"
            self._num_requests += 1
            self._answers[name] = Answered(list(prompt))
            mine.append(self._answers[name])
            self._core.handle(Submit(name, list(prompt), params))
        while self._core.has_work:
            outputs = self._core.step()
            for output in outputs.outputs if outputs is not None else []:
                self._take(output)
                on_tokens(len(output.token_ids))
        return mine

    def _take(self, output: SequenceOutput) -> None:
        if output.error is not None:
            raise gave_up(self._started.checkpoint, output.error, "Give fewer or shorter documents.")
        answer = self._answers[output.request_id]
        answer.num_rounds += bool(answer.tokens and output.token_ids)
        answer.tokens += output.token_ids

    def _heard(self, sequences: list[Sequence], num: int) -> list[list[int]]:
        drafts: list[list[int]] = self._propose(sequences, num)
        for sequence, mine in zip(sequences, drafts, strict=True):
            answer = self._answers.get(sequence.request_id)
            if answer is not None and mine:
                answer.num_cached = sequence.num_cached
                answer.proposals[len(sequence.tokens)] = Proposal(len(sequence.tokens), tuple(mine))
                answer.keys = self._keys_of(sequence)
        return drafts

    def _keys_of(self, sequence: Sequence) -> torch.Tensor | None:
        pool = draft_keys(self._started.drafter)
        if pool is None:
            return None
        num, size = len(sequence.tokens) - 1, self._started.section.page_size_tokens
        return pool[torch.from_numpy(slots_of(sequence.pages, num, size)[1:])].float()

    def _executed(self, plan: StepPlan) -> torch.Tensor:
        runner = self._started.runner
        logits = runner.run(plan)
        states = runner.states
        row = 0
        sequences = self._core.scheduler.running_sequences()
        for sequence, begin, count in zip(sequences, plan.starts, plan.counts, strict=True):
            answer = self._answers.get(sequence.request_id)
            if answer is not None:
                for place in range(count):
                    answer.states[begin + place] = states[row + place].clone()
            row += count
        return logits


def answer_in_engine(
    order: Order,
    prompts: list[list[int]],
    lengths: list[int],
    on_tokens: Callable[[int], None] = lambda num: None,
) -> list[Answered]:
    """Answers of these lengths, by the engine with the drafter."""
    return Listening(start_drafting(order)).answer(prompts, lengths, on_tokens)


def acceptance_length(answers: list[Answered]) -> float:
    """Tokens of a step, counted as `chain.run_chain` counts them: without the first token of an answer."""
    emitted = sum(len(answer.tokens) - 1 for answer in answers)
    return emitted / max(sum(answer.num_rounds for answer in answers), 1)


def draft_keys(drafter: Any) -> torch.Tensor | None:
    """The keys [slots, K, D] of an EAGLE-3 drafter; None where they are kept in codes."""
    layer = getattr(drafter, "_layer", None)
    keys = getattr(layer, "keys", None)
    if keys is None:
        keys = getattr(getattr(layer, "pool", None), "keys", [None])[0]
    is_plain = isinstance(keys, torch.Tensor) and keys.dim() == 3 and keys.is_floating_point()
    return keys if is_plain else None


def start_drafting(order: Order) -> Started:
    """The engine as `firstlight serve --drafter FOLDER` starts it, on one rank and in this process."""
    section = engine_section(order, drafter=str(order.drafter), draft_tokens=order.k, draft_adapt=False)
    started = start(order.target.checkpoint, "auto", section, Group(), quiet)
    assert started.drafter is not None, "an engine with a drafter that does not draft"
    return started


def engine_section(order: Order, **more: Any) -> EngineSection:
    """Settings of an engine with room for a few documents."""
    d = order.target.checkpoint.description
    length = min(order.max_tokens + order.answer_tokens + order.k + 2, d.max_position)
    token_bytes = 4 * (2 * d.num_layers * d.num_kv_heads * d.head_size + STATES_OF_A_TOKEN * d.hidden_size)
    return EngineSection(
        threads=order.threads,
        cpu_kernels=order.cpu_kernels,
        max_num_seqs=MAX_SEQUENCES,
        max_model_len=length,
        kv_memory_bytes=MAX_SEQUENCES * length * token_bytes,
        **more,
    )
