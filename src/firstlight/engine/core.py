"""The engine's step: intake, plan, run, sample, apply, emit. Rank 0, or the process of the offline `LLM`.

Invariant: every submitted request ends with exactly one output that has a finish reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from firstlight.base.blackbox.events import STEP
from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.engine.messages import (
    FINISH_ERROR,
    Abort,
    Drain,
    EngineStats,
    SequenceOutput,
    StepOutputs,
    Submit,
    ToEngine,
)
from firstlight.engine.sampling.sampler import Sampler
from firstlight.engine.sampling.verify import choose
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.speculation.speculation import Speculation
from firstlight.ops.selection import Selection
from firstlight.ops.step_clock import Kind, StepClock

Execute = Callable[[StepPlan], torch.Tensor]


class EngineCore:
    """`execute` runs a plan on all ranks and returns the logits [L, V] of the sampled entries.

    Each step is written to `recorder`: its number when it ended, and the queue. With `speculation`, steps
    carry drafts once it was told to begin. `clock`: the rank's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Execute,
        recorder: Recorder | None = None,
        selection: Selection | None = None,
        speculation: Speculation | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._sampler = Sampler(selection)
        self.speculation = speculation
        self._recorder = recorder or NoBox()
        self._clock = clock or StepClock()
        self._events = self._recorder.ring("steps")
        self._step_name = self._recorder.name(STEP)
        self.closed: str | None = None  # why nothing new is taken, while what is there goes on

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def begin(self, times_s: Mapping[int, float]) -> None:
        """What runs from now on is users': drafts may be made. `times_s`: of steps by their rows."""
        if self.speculation is not None:
            self.speculation.begin(times_s)

    def handle(self, message: ToEngine) -> None:
        """Takes one message; its consequences are in the outputs of the next `step`."""
        if isinstance(message, Submit) and self.closed is not None:
            self.scheduler.finish_unrun(message.request_id, FINISH_ERROR, self.closed)
        elif isinstance(message, Submit):
            self.scheduler.submit(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.scheduler.abort(request_id)
        else:
            assert isinstance(message, Drain), "a message that is not for the engine"

    def step(self) -> StepOutputs | None:
        """Runs one step if there is work. None: nothing ran and nothing ended."""
        started_s = perf_counter()
        if self.speculation is not None:
            sequences = self.scheduler.decoding_sequences()
            self._clock.run(Kind.DRAFTING, self.speculation.propose, sequences)
        plan = self.scheduler.plan()
        outputs = self.scheduler.take_finished()
        if plan is None and not outputs:
            return None
        stats = self.scheduler.stats()
        if plan is not None:
            self._recorder.set(Counter.RUNNING, stats.num_running)  # a step that hangs has somebody waiting
            outputs += self._run(plan)
            stats = self.scheduler.stats()
            stats.step_s = perf_counter() - started_s
            if self.speculation is not None:
                stats.drafts = self.speculation.counts
                if len(plan.samples) == plan.num_tokens:
                    self.speculation.record_time(plan.num_tokens, stats.step_s)
        self._record(stats)
        return StepOutputs(outputs, stats)

    def _record(self, stats: EngineStats) -> None:
        recorder = self._recorder
        recorder.set(Counter.STEP, stats.num_steps)
        recorder.set(Counter.RUNNING, stats.num_running)
        recorder.set(Counter.WAITING, stats.num_waiting)
        recorder.set(Counter.PAGES_USED, stats.pages_used)
        microseconds = int(stats.step_s * 1e6)
        self._events.write(
            self._step_name, stats.num_steps, stats.step_sequences, stats.step_tokens, microseconds
        )

    def _run(self, plan: StepPlan) -> list[SequenceOutput]:
        logits = self._execute(plan)
        speculation = self.speculation
        if speculation is not None:
            running = self.scheduler.running_sequences()
            self._clock.run(Kind.DRAFTING, speculation.observe, plan, running)
        if not plan.samples:
            return self.scheduler.apply(plan, [])
        sequences = self.scheduler.planned_sequences()
        rule = None if speculation is None else speculation.rule
        chosen = self._clock.run(Kind.SAMPLING, choose, self._sampler, logits, sequences, rule)
        outputs = self.scheduler.apply(plan, chosen.runs, chosen.logprobs)
        if speculation is not None:
            speculation.record(sequences, outputs)
            speculation.moved(*self.scheduler.moves())
        return outputs
