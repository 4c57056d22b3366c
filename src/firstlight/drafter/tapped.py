"""An engine that keeps the hidden states of what it generates: answers and states in one pass.

The engine is started and stepped like any other; only its `execute` is wrapped, which reads the runner's
captured states after each step. Invariant: the states of an answer are those of its very tokens, which are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.base.config import EngineSection
from firstlight.drafter.capture import CaptureSettings, state_layers
from firstlight.drafter.loops import loop_start
from firstlight.drafter.target import Target
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, SequenceOutput, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.not_numbers import gave_up
from firstlight.engine.worker.startup import Started, quiet, start
from firstlight.ops.collectives import Group

LOOK_EVERY = 8  # tokens of an answer between two looks for a loop


@dataclass
class Tapped:
    """One answer; `states` [T - 1, C + 1, H] of prompt and answer: the last token was never computed."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class _Kept:
    """What ran in one slot since its sequence began."""

    tokens: list[int] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)


class TappedEngine:
    """See the module. `layers` are the captured ones without the last state."""

    def __init__(self, target: Target, settings: CaptureSettings, engine: dict[str, Any]) -> None:
        self.layers = state_layers(target, settings.layers)
        options = {name: value for name, value in engine.items() if name != "dtype"}
        # A prompt's tokens that came from the prefix cache would leave no states.
        section = EngineSection(**{**options, "cpu_kernels": settings.cpu_kernels, "prefix_cache": False})
        every = (*self.layers, target.checkpoint.description.num_layers)
        self._started: Started = start(target.checkpoint, settings.dtype, section, Group(), quiet, every)
        self._core: EngineCore = self._started.core(self._execute)
        self._kept: dict[int, _Kept] = {}

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, on_done: Callable[[int], None]
    ) -> list[Tapped]:
        """Answers all prompts, batched; `on_done` hears of each that is finished. `params` have a seed.

        An answer that has begun to repeat itself is ended there: what would come is cut anyway.
        """
        answers = {str(index): Tapped(tokens) for index, tokens in enumerate(prompts)}
        for name, answer in answers.items():
            self._core.handle(Submit(name, answer.prompt_token_ids, params))
        while self._core.has_work:
            outputs = self._core.step()
            for output in outputs.outputs if outputs is not None else []:
                answer = answers[output.request_id]
                if answer.finish_reason is not None:
                    continue  # the scheduler's word on what was ended here
                self._take(answer, output)
                if answer.finish_reason is None and _loops(answer):
                    self._core.handle(Abort([output.request_id]))
                    self._end(answer, "loop")
                on_done(answer.finish_reason is not None)
        # Its word on those that were ended last must not be taken for one on the next prompts.
        self._core.scheduler.take_finished()
        return list(answers.values())

    def _execute(self, plan: StepPlan) -> torch.Tensor:
        runner = self._started.runner
        logits = runner.run(plan)
        states = runner.states.to(torch.bfloat16)
        row = 0
        for slot, begin, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if begin == 0:
                self._kept[slot] = _Kept()
            kept = self._kept[slot]
            assert len(kept.tokens) == begin, "a sequence went on where it had not stopped"
            kept.tokens += plan.tokens[row : row + count]
            kept.parts.append(states[row : row + count])
            row += count
        return logits

    def _take(self, answer: Tapped, output: SequenceOutput) -> None:
        if output.error is not None:
            remedy = "Use a smaller --batch, or shorter prompts."
            raise gave_up(self._started.checkpoint, output.error, remedy)
        answer.token_ids += output.token_ids
        if output.finish_reason is not None:
            self._end(answer, output.finish_reason)

    def _end(self, answer: Tapped, reason: str) -> None:
        answer.finish_reason = reason
        computed = (answer.prompt_token_ids + answer.token_ids)[:-1]
        kept = next((kept for kept in self._kept.values() if kept.tokens == computed), None)
        assert kept is not None, "an answer whose tokens no slot has computed"
        answer.states = torch.cat(kept.parts)


def _loops(answer: Tapped) -> bool:
    return len(answer.token_ids) % LOOK_EVERY == 0 and loop_start(answer.token_ids) is not None
