"""`firstlight bench path`: what tokenising, HTTP and scheduling take from the cores that compute.

It starts a server of its own and puts it under a closed loop of chat requests. Invariants: the share is of
full decode steps only, and the client's own cost is in no figure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from firstlight.base.blackbox.events import STEP
from firstlight.base.blackbox.reader import EventRecord, NotABox, read_box
from firstlight.base.blackbox.store import box_path
from firstlight.base.errors import EngineError
from firstlight.bench.engine.scheduler import bench_scheduler
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.bench.serving.prompts import SyntheticPrompts
from firstlight.bench.serving.server_process import ServerProcess
from firstlight.bench.serving.serving import ServingOrder, bench_serving
from firstlight.bench.serving.stack_samples import Sampled, sample_stacks

GOAL_SHARE = 0.10
_LOOK_S = 0.5
_SCHEDULER_STEPS = 200
_FULL_SHARE = 0.9  # of the concurrency that makes a step a full one


@dataclass(frozen=True, kw_only=True)
class PathOrder:
    """The load: `concurrency` chat requests at a time, `requests` in all, of so many tokens each."""

    model: Path
    concurrency: int = 32
    requests: int = 96
    prompt_tokens: int = 64
    output_tokens: int = 128
    flags: tuple[str, ...] = ()
    with_profile: bool = False


@dataclass(frozen=True, kw_only=True)
class PathReport:
    """Seconds of one full decode step, and of what is done beside the model for it.

    `api_s`: processor time of the api process for the tokens of a step, prompts and HTTP included.
    `between_s`: from the end of a step to the start of the next: messages in and out of rank 0.
    `scheduling_s`: plan and bookkeeping within a step. `profile`: where the api process spends its time.
    """

    model: str
    concurrency: int
    tokens_per_s: float
    step_s: float
    api_s: float
    between_s: float
    scheduling_s: float
    num_steps: int
    profile: tuple[Sampled, ...] = ()

    @property
    def share(self) -> float:
        """Of a step's time."""
        return (self.api_s + self.between_s + self.scheduling_s) / self.step_s

    @property
    def meets_goal(self) -> bool:
        return self.share <= GOAL_SHARE


def bench_path(order: PathOrder, on_progress: Callable[[int, int], None]) -> PathReport:
    """Loads the server once for the times, and with a profile once more for that."""
    with ServerProcess([str(order.model), *order.flags]) as server:
        server.wait_until_ready()
        watch = _Watch(server)
        before_s = watch.api_cpu_s()
        load = _Load(order, server.url, on_progress)
        events = watch.until_over(load)
        api_s = watch.api_cpu_s() - before_s
        report = load.report
        steps = full_steps(events, order.concurrency * _FULL_SHARE)
        profile: tuple[Sampled, ...] = ()
        if order.with_profile:
            again = _Load(order, server.url, on_progress)
            profile = sample_stacks(server.pid("api"), again.is_over)
            again.join()
    tokens = report.output_tokens
    point = bench_scheduler(order.concurrency, [0], _SCHEDULER_STEPS).points[0]
    return PathReport(
        model=str(order.model),
        concurrency=order.concurrency,
        tokens_per_s=report.output_tokens_per_s,
        step_s=median([step.seconds for step in steps]),
        api_s=api_s / tokens * median([step.num_tokens for step in steps]),
        between_s=median([step.before_s for step in steps]),
        scheduling_s=point.step_s.percentiles[50],
        num_steps=len(steps),
        profile=profile,
    )


@dataclass(frozen=True)
class Step:
    """A decode step: its seconds, its tokens, and the seconds between the step before it and itself."""

    seconds: float
    num_tokens: int
    before_s: float


def full_steps(events: list[EventRecord], at_least: float) -> list[Step]:
    """The pure decode steps of at least so many sequences that came right after another one."""
    found = []
    for before, event in pairwise(sorted(events, key=lambda event: event.number)):
        _, num_sequences, num_tokens, microseconds = event.values[:4]
        is_next = event.number == before.number + 1
        if is_next and num_sequences == num_tokens and num_sequences >= at_least:
            seconds = microseconds / 1e6
            found.append(Step(seconds, num_tokens, max(0.0, event.time_s - seconds - before.time_s)))
    if not found:
        raise EngineError(
            f"no step ran {at_least:.0f} sequences at once",
            "Give more --requests, or a smaller --concurrency.",
        )
    return found


class _Load:
    """The requests, sent from a thread of their own."""

    def __init__(self, order: PathOrder, url: str, on_progress: Callable[[int, int], None]) -> None:
        prompts = SyntheticPrompts(num_tokens=order.prompt_tokens)
        self._order = ServingOrder(
            url=url,
            api="chat",
            prompts=prompts,
            num_requests=order.requests,
            output_tokens=order.output_tokens,
            concurrency=order.concurrency,
        )
        self._thread = threading.Thread(target=self._run, args=(on_progress,), daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self, on_progress: Callable[[int, int], None]) -> None:
        self.report = bench_serving(self._order, on_progress)


class _Watch:
    """Looks at the server's processes from outside."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._box = box_path(server.run_directory(), "rank-0")

    def api_cpu_s(self) -> float:
        return self._server.cpu_s("api")

    def until_over(self, load: _Load) -> list[EventRecord]:
        """The steps of rank 0 while the load lasts: its ring holds the latest few hundred only."""
        found: dict[int, EventRecord] = {}
        while not load.is_over():
            time.sleep(_LOOK_S)
            try:
                events = read_box(self._box).events
            except NotABox as error:
                raise EngineError(
                    f"the black box of rank 0 cannot be read: {error}", self._server.try_alone
                ) from error
            found |= {event.number: event for event in events if event.name == STEP}
        return list(found.values())


def tables(report: PathReport) -> tuple[Table | str, ...]:
    """For people."""
    verdict = "met" if report.meets_goal else "NOT met"
    rows = [
        (
            what,
            f"{seconds * 1e3:,.2f}",
            f"{seconds / report.concurrency * 1e6:,.0f}",
            f"{seconds / report.step_s:.1%}",
        )
        for what, seconds in (
            ("the step", report.step_s),
            ("api process: tokenising, HTTP, streaming", report.api_s),
            ("rank 0 between two steps: messages", report.between_s),
            ("rank 0 within a step: scheduling", report.scheduling_s),
        )
    ]
    title = (
        f"{report.concurrency} at a time, {report.tokens_per_s:,.0f} tok/s, {report.num_steps} full steps: "
        f"beside the model {report.share:.1%} of a step; at most {GOAL_SHARE:.0%} is {verdict}"
    )
    shown: list[Table | str] = [plain_table(title, ("", "ms a step", "µs a token", "of a step"), rows)]
    if report.profile:
        lines = [(one.what, f"{one.share:.1%}") for one in report.profile]
        shown.append(plain_table("where the api process spends its time", ("", "share"), lines))
    return tuple(shown)
