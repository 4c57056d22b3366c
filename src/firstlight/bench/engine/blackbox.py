"""`firstlight bench blackbox`: what writing a black box costs, alone and in the throughput of the engine.

Each write is timed in a loop, the loop included; the engine runs the same requests with a box and without
one, a step each in turns, so that a neighbour's load meets both. Invariant: both engines share one model, and
nothing but the recorder differs.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, perf_counter_ns

from rich.table import Table

from firstlight.base.blackbox.events import STEP
from firstlight.base.blackbox.layout import NUM_PHASES, Counter
from firstlight.base.blackbox.recorder import NoBox
from firstlight.base.blackbox.store import FOLDER, make_box_folder, open_own_box
from firstlight.base.blackbox.writer import BlackBox
from firstlight.base.phases import WEIGHTS
from firstlight.bench.engine.in_process import open_engine
from firstlight.bench.engine.offline import OfflineOrder
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams

GOAL_NS = 1000.0
PROMPT_TOKENS = 16
_REPEATS = 7
_CERTAINTY = 0.95


@dataclass(frozen=True, kw_only=True)
class BlackBoxOrder:
    """What to measure: `writes` of each kind a repeat; `rounds` of `batch` requests with `tokens` each."""

    model: Path
    writes: int = 100_000
    rounds: int = 12
    batch: int = 8
    tokens: int = 32
    threads: int = 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Nanoseconds of one write: the median of several repeats, the least and the most."""

    what: str
    median_ns: float
    least_ns: float
    most_ns: float
    has_goal: bool  # GOAL_NS is for what is written all the time

    @property
    def meets_goal(self) -> bool:
        return not self.has_goal or self.median_ns <= GOAL_NS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Tokens a second of each round, the median ratio (with a box / without), and where it may truly be.

    `interval`: 95 % of the median ratio, by the order of the ratios alone. `is_within_noise`: it holds 1.
    """

    with_box: tuple[float, ...]
    without_box: tuple[float, ...]
    ratio: float
    interval: tuple[float, float]
    is_within_noise: bool


@dataclass(frozen=True)
class BlackBoxReport:
    """`step_share`: the share that a step's writes must take, from their cost alone."""

    model: str
    costs: tuple[Cost, ...]
    throughput: Comparison
    step_share: float

    @property
    def meets_goal(self) -> bool:
        return all(cost.meets_goal for cost in self.costs)


def bench_blackbox(order: BlackBoxOrder, on_round: Callable[[int, int], None]) -> BlackBoxReport:
    """Measures the writes, then loads the model and runs it with and without a box."""
    costs = measure_costs(order.writes)
    with_box, without_box = _throughput(order, on_round)
    step_s = order.batch / median(without_box)
    return BlackBoxReport(
        str(order.model), costs, compare(with_box, without_box), costs[-1].median_ns / 1e9 / step_s
    )


def measure_costs(writes: int) -> tuple[Cost, ...]:
    """Of each kind of write; the last is all that the engine writes in a step."""
    return (
        _cost("event", _time_events, writes),
        _cost("counter", _time_counters, writes),
        _cost("collective, enter and leave", _time_collectives, writes),
        _cost("phase", _time_phases, min(writes, NUM_PHASES), has_goal=False),
        _cost("all of an engine step", _time_steps, writes, has_goal=False),
    )


def compare(with_box: Sequence[float], without_box: Sequence[float]) -> Comparison:
    """Of rounds that were run in pairs."""
    ratios = sorted(one / other for one, other in zip(with_box, without_box, strict=True))
    low, high = median_interval(ratios)
    return Comparison(
        with_box=tuple(with_box),
        without_box=tuple(without_box),
        ratio=median(ratios),
        interval=(low, high),
        is_within_noise=low <= 1.0 <= high,
    )


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the true median is with 95 % certainty: as many values are cut off each end as chance allows.

    Assumes nothing about how the values are distributed. All of them where they are too few to tell.
    """
    count = len(ordered)
    cut, chance = 0, 0.0  # that the median lies beyond the values cut off at one end, or beyond the next
    for place in range((count - 1) // 2):
        chance += math.comb(count, place) / 2**count
        if 2 * chance > 1 - _CERTAINTY:
            break
        cut = place
    return ordered[cut], ordered[count - 1 - cut]


@contextlib.contextmanager
def _new_box() -> Iterator[BlackBox]:
    """A box where those of a run are: in memory."""
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        run_dir = Path(folder)
        real = make_box_folder(run_dir)
        try:
            box = open_own_box(run_dir, "bench", role="bench")
            yield box
            with contextlib.suppress(BufferError):
                box.close()
        finally:
            shutil.rmtree(real)
            (run_dir / FOLDER).unlink(missing_ok=True)


def _cost(what: str, timed: Callable[[BlackBox, int], int], writes: int, *, has_goal: bool = True) -> Cost:
    found = []
    for _ in range(_REPEATS):
        with _new_box() as box:
            found.append(timed(box, writes) / writes)
    return Cost(
        what=what, median_ns=median(found), least_ns=min(found), most_ns=max(found), has_goal=has_goal
    )


def _time_events(box: BlackBox, writes: int) -> int:
    write, name = box.ring("bench").write, box.name(STEP)
    start_ns = perf_counter_ns()
    for number in range(writes):
        write(name, number, 8, 8, 25_000)
    return perf_counter_ns() - start_ns


def _time_counters(box: BlackBox, writes: int) -> int:
    start_ns = perf_counter_ns()
    for number in range(writes):
        box.set(Counter.STEP, number)
    return perf_counter_ns() - start_ns


def _time_collectives(box: BlackBox, writes: int) -> int:
    name = box.name("bench")
    start_ns = perf_counter_ns()
    for number in range(writes):
        box.enter_collective(name, number)
        box.leave_collective(name, number)
    return perf_counter_ns() - start_ns


def _time_phases(box: BlackBox, writes: int) -> int:
    start_ns = perf_counter_ns()
    for number in range(writes):
        box.enter_phase(WEIGHTS, number, "bytes", "model.layers.0")
    return perf_counter_ns() - start_ns


def _time_steps(box: BlackBox, writes: int) -> int:
    """What `EngineCore.step` writes, in its order."""
    write, name = box.ring("bench").write, box.name(STEP)
    start_ns = perf_counter_ns()
    for number in range(writes):
        box.set(Counter.RUNNING, 8)
        box.set(Counter.STEP, number)
        box.set(Counter.RUNNING, 8)
        box.set(Counter.WAITING, 0)
        box.set(Counter.PAGES_USED, 40)
        write(name, number, 8, 8, 25_000)
    return perf_counter_ns() - start_ns


def _throughput(
    order: BlackBoxOrder, on_round: Callable[[int, int], None]
) -> tuple[list[float], list[float]]:
    """Tokens a second with a box and without, by round; a round that warms up is left out."""
    sizes = OfflineOrder(
        model=order.model,
        threads=order.threads,
        batches=(order.batch,),
        lengths=(PROMPT_TOKENS,),
        decode_steps=order.tokens,
    )
    engine = open_engine(order.model, "auto", sizes.section)
    vocab_size = engine.checkpoint.description.vocab_size
    rates: tuple[list[float], list[float]] = ([], [])
    with _new_box() as box:
        cores = [engine.core(engine.runner.run, recorder) for recorder in (box, NoBox())]
        for number in range(order.rounds + 1):
            prompts = _prompts(number, order.batch, vocab_size)
            for kept, rate in zip(rates, _run_in_turns(cores, prompts, order.tokens), strict=True):
                kept.append(rate)
            on_round(number, order.rounds)
    return rates[0][1:], rates[1][1:]


def _prompts(seed: int, batch: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(vocab_size), k=PROMPT_TOKENS) for _ in range(batch)]


def _run_in_turns(cores: Sequence[EngineCore], prompts: Sequence[list[int]], num_new: int) -> list[float]:
    """Tokens a second of each engine, by the time of its own steps.

    All engines have the same requests and greedy sampling, hence the same pages with the same content: that
    they share one pool changes nothing.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, seed=0)
    for core in cores:
        for number, prompt in enumerate(prompts):
            core.handle(Submit(f"bench-{number}", prompt, params))
    spent_s = [0.0 for _ in cores]
    places = list(range(len(cores)))
    while any(core.has_work for core in cores):
        for place in places:
            start_s = perf_counter()
            cores[place].step()
            spent_s[place] += perf_counter() - start_s
        places.reverse()  # who comes second finds the weights in the caches as the first left them
    for core in cores:
        core.scheduler.take_finished()
    return [len(prompts) * num_new / seconds for seconds in spent_s]


def tables(report: BlackBoxReport) -> tuple[Table, Table, str]:
    """For people: the costs, the throughput, and what is to be said of them."""
    verdict = "met" if report.meets_goal else "NOT met"
    title = f"black box: nanoseconds a write; at most {GOAL_NS:,.0f} is {verdict}"
    rows = [
        (cost.what, f"{cost.median_ns:,.0f}", f"{cost.least_ns:,.0f}", f"{cost.most_ns:,.0f}", _goal(cost))
        for cost in report.costs
    ]
    run = report.throughput
    arms = (("with a black box", run.with_box), ("without", run.without_box))
    low, high = run.interval
    noise = "within noise" if run.is_within_noise else "NOT within noise"
    return (
        plain_table(title, ("", "median", "least", "most", "goal"), rows),
        plain_table(
            f"engine in process: tokens/s, {len(run.with_box)} rounds, a step each in turns",
            ("", "median", "least", "most"),
            [
                (name, f"{median(rates):,.1f}", f"{min(rates):,.1f}", f"{max(rates):,.1f}")
                for name, rates in arms
            ],
        ),
        f"with / without: {run.ratio:.4f} (95 % interval {low:.4f} to {high:.4f}), {noise}; "
        f"a step's writes alone are {report.step_share:.4%} of it",
    )


def _goal(cost: Cost) -> str:
    if not cost.has_goal:
        return "-"
    return "met" if cost.meets_goal else "NOT met"
