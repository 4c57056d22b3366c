"""`firstlight bench scheduler`: the Python time of a step's bookkeeping, with short and long queues.

Invariant: only full decode steps are counted, from `plan` to `stats`, which is all that the scheduler does in
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.bench.measures import Summary, median, summarize
from firstlight.bench.report import SUMMARY_COLUMNS, plain_table, summary_row
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 60
GOAL_S = 1e-3


@dataclass(frozen=True)
class QueuePoint:
    """Seconds of a step with so many requests waiting."""

    num_waiting: int
    plan_s: float
    apply_s: float
    step_s: Summary


@dataclass(frozen=True)
class SchedulerReport:
    """By length of the queue."""

    num_running: int
    points: tuple[QueuePoint, ...]

    @property
    def meets_goal(self) -> bool:
        return all(point.step_s.percentiles[50] < GOAL_S for point in self.points)


def bench_scheduler(num_running: int, queues: Sequence[int], num_steps: int) -> SchedulerReport:
    """Measures `num_steps` decode steps for each length of the queue."""
    points = tuple(_measure(num_running, num_waiting, num_steps) for num_waiting in queues)
    return SchedulerReport(num_running, points)


def _measure(num_running: int, num_waiting: int, num_steps: int) -> QueuePoint:
    scheduler = _filled(num_running, num_waiting, num_steps)
    plans_s: list[float] = []
    applies_s: list[float] = []
    while len(plans_s) < num_steps:
        start_s = perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned_s = perf_counter()
        scheduler.apply(plan, [[5]] * len(plan.samples))
        scheduler.stats()
        applied_s = perf_counter()
        if len(plan.samples) == num_running == plan.num_tokens:
            plans_s.append(planned_s - start_s)
            applies_s.append(applied_s - planned_s)
    steps = summarize(plan_s + apply_s for plan_s, apply_s in zip(plans_s, applies_s, strict=True))
    assert steps is not None
    return QueuePoint(num_waiting, median(plans_s), median(applies_s), steps)


def _filled(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose sequences outlast the measurement, and with room for all of them."""
    new_tokens = num_steps + num_running  # while the last are still being prefilled, the first decode already
    section = EngineSection(
        max_num_seqs=num_running,
        max_batched_tokens=max(512, num_running),
        max_model_len=PROMPT_TOKENS + new_tokens + 2,
        max_queue=num_running + num_waiting,
    )
    pages = num_running * (section.max_model_len // section.page_size_tokens + 2)
    scheduler = Scheduler(section, pages + 1, [2])
    params = SamplingParams(max_tokens=new_tokens, seed=1)
    for number in range(num_running + num_waiting):
        prompt = [10 + number % 89, *range(10, 10 + PROMPT_TOKENS - 1)]
        scheduler.submit(Submit(f"bench-{number}", prompt, params))
    return scheduler


def table(report: SchedulerReport) -> Table:
    """For people."""
    rows = [
        (
            *summary_row(f"{point.num_waiting:,} waiting", point.step_s, 1e6),
            f"{point.plan_s * 1e6:,.1f}",
            f"{point.apply_s * 1e6:,.1f}",
        )
        for point in report.points
    ]
    columns = ("µs", *SUMMARY_COLUMNS, "plan", "apply")
    verdict = "met" if report.meets_goal else "NOT met"
    title = f"scheduler: a step of {report.num_running} running sequences; median under 1 ms is {verdict}"
    return plain_table(title, columns, rows)
