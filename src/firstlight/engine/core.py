"""The engine's step: intake, plan, run, sample, apply, emit. Rank 0, or the process of the offline `LLM`.

Owned by `engine.rank` (behind sockets) and by `firstlight.llm` (in process). Invariant: every submitted
request ends with exactly one output that has a finish reason.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from firstlight.engine.messages import Abort, Drain, SequenceOutput, StepOutputs, Submit, ToEngine
from firstlight.engine.plan import StepPlan
from firstlight.engine.sampler import Sampler
from firstlight.engine.scheduler import Scheduler

Execute = Callable[[StepPlan], torch.Tensor]


class EngineCore:
    """`execute` runs a plan on all ranks and returns the logits [L, V] of the sampled entries."""

    def __init__(self, scheduler: Scheduler, execute: Execute) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._sampler = Sampler()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def handle(self, message: ToEngine) -> None:
        """Takes one message; its consequences are in the outputs of the next `step`."""
        if isinstance(message, Submit):
            self.scheduler.submit(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.scheduler.abort(request_id)
        else:
            assert isinstance(message, Drain), "a message of unknown kind"

    def step(self) -> StepOutputs | None:
        """Runs one step if there is work. None: nothing ran and nothing ended."""
        started_s = perf_counter()
        plan = self.scheduler.plan()
        outputs = self.scheduler.take_finished()
        if plan is None and not outputs:
            return None
        stats = self.scheduler.stats()
        if plan is not None:
            outputs += self._run(plan)
            stats = self.scheduler.stats()
            stats.step_s = perf_counter() - started_s
        return StepOutputs(outputs, stats)

    def _run(self, plan: StepPlan) -> list[SequenceOutput]:
        logits = self._execute(plan)
        if not plan.samples:
            return self.scheduler.apply(plan, [])
        sampled = self._sampler.sample(logits, self.scheduler.planned_sequences(plan))
        logprobs = {plan.samples[row]: value for row, value in sampled.logprobs.items()}
        return self.scheduler.apply(plan, sampled.tokens, logprobs)
