"""`firstlight bench collectives`: how long the engine's all-reduce takes, by size and by what carries it.

The ranks are processes that join as an engine's do; this one is rank 0. What is compared takes turns.
Invariant: the sums that are timed are those that layers call, through `ops.collectives`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.table import Table
from torch import multiprocessing

from firstlight.base.errors import UsageError
from firstlight.bench.measures import median, percentile
from firstlight.bench.plots import Panel, save_panels
from firstlight.bench.report import plain_table
from firstlight.ops.collectives import CPU, Group, Wish, join

SIZES = tuple(1024 * 2**power for power in range(15))  # bytes, to 16 MiB
SMALL_BYTES = 64 * 1024
ROUND_BYTES = 48 * 2**20  # that one round sends, at most
NOISY = 0.3  # a fit that is off by more was not measured on a quiet machine
DROP = 0.1  # of the time, from a size to the next one: no sum gets so much faster by being larger
TOO_NOISY = "too noisy to plan with: repeat on a quiet machine"
MOST_CALLS, LEAST_CALLS = 150, 4
DEADLINE_S = 60.0


@dataclass(frozen=True)
class CollectivesOrder:
    """What is measured: `num_ranks` ranks on a device, each size in so many rounds."""

    num_ranks: int = 2
    device: str = "cpu"
    rounds: int = 5
    sizes: tuple[int, ...] = SIZES


@dataclass(frozen=True)
class SizePoint:
    """The times of one size over one carrier; `cpu_s` is what all threads of this rank used for a call."""

    carrier: str
    num_bytes: int
    num_calls: int
    median_s: float
    p99_s: float
    cpu_s: float


@dataclass
class Times:
    """Of the calls of one size over one carrier."""

    calls_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Fit:
    """alpha + beta * bytes, with the smallest relative errors at the medians; `worst` is the largest."""

    latency_s: float
    s_per_byte: float
    worst: float

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.s_per_byte if self.s_per_byte > 0 else float("inf")


@dataclass
class CollectivesReport:
    """By carrier: what it says of itself, and its fit."""

    num_ranks: int
    num_cores: int
    words: dict[str, str] = field(default_factory=dict)
    points: list[SizePoint] = field(default_factory=list)
    fits: dict[str, Fit] = field(default_factory=dict)


def bench_collectives(order: CollectivesOrder, on_size: Callable[[int, int], None]) -> CollectivesReport:
    """Starts the other ranks and measures; `on_size(done, total)` after each size.

    Raises `UsageError` for one rank, and `EngineError` where a rank does not come.
    """
    if order.num_ranks < 2:
        raise UsageError("one rank sums with nobody.", "Use --ranks 2 or more.")
    report = CollectivesReport(order.num_ranks, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, _others(order, folder):
        groups = _join(order, 0, folder)
        report.words = {name: group.transport.words for name, group in groups.items() if group.transport}
        for done, num_bytes in enumerate(order.sizes, 1):
            times = _measure(order, groups, num_bytes)
            report.points += [_point(name, num_bytes, times[name]) for name in groups]
            on_size(done, len(order.sizes))
    for name in report.words:
        of_carrier = [point for point in report.points if point.carrier == name]
        report.fits[name] = fit([(point.num_bytes, point.median_s) for point in of_carrier])
    return report


@contextmanager
def _others(order: CollectivesOrder, folder: str) -> Iterator[None]:
    """All ranks but this one; they end with the block at the latest."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_other, args=(order, rank, folder), daemon=True)
        for rank in range(1, order.num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        yield
        for process in ranks:
            process.join(DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _other(order: CollectivesOrder, rank: int, folder: str) -> None:
    groups = _join(order, rank, folder)
    for num_bytes in order.sizes:
        _measure(order, groups, num_bytes)


def _join(order: CollectivesOrder, rank: int, folder: str) -> dict[str, Group]:
    """The same ranks once for each carrier: NCCL; or shared memory, if it can be had, and gloo."""
    torch.set_num_threads(1)
    device = CPU if order.device == "cpu" else torch.device(order.device, rank)
    groups: dict[str, Group] = {}
    for means in ("auto", "gloo") if order.device == "cpu" else ("auto",):
        group = Group(rank, order.num_ranks, DEADLINE_S, device)
        join(group, Path(folder) / means, Wish(order.device, means))
        assert group.transport is not None, "several ranks"
        name = group.transport.words.partition(" of ")[0].partition(":")[0]
        groups[name] = group
        if name == "gloo":  # memory cannot be shared, and a process has one group of torch's
            break
    return groups


def _measure(order: CollectivesOrder, groups: dict[str, Group], num_bytes: int) -> dict[str, Times]:
    """Of each call on this rank, by carrier; the first call of a round does not count."""
    num_calls = max(LEAST_CALLS, min(MOST_CALLS, ROUND_BYTES // num_bytes))
    times = {name: Times() for name in groups}
    for _ in range(order.rounds):
        for name, group in groups.items():
            values = torch.zeros(num_bytes // 4, device=group.device)
            _time(group, values)
            cpu_before_s = process_time()
            times[name].calls_s += [_time(group, values) for _ in range(num_calls)]
            times[name].cpu_s += process_time() - cpu_before_s
    return times


def _time(group: Group, values: torch.Tensor) -> float:
    started_s = perf_counter()
    group.all_reduce("bench", values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return perf_counter() - started_s


def _point(carrier: str, num_bytes: int, times: Times) -> SizePoint:
    ordered = sorted(times.calls_s)
    num, p99_s = len(ordered), percentile(ordered, 99)
    return SizePoint(carrier, num_bytes, num, median(ordered), p99_s, times.cpu_s / num)


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """Through (bytes, seconds); latency and rate are never negative."""
    weights = [seconds**-2 for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_bytes) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    both = sum(
        w * (size - mean_bytes) * (seconds - mean_s)
        for w, (size, seconds) in zip(weights, points, strict=True)
    )
    slope = max(0.0, both / spread) if spread else 0.0
    latency_s = mean_s - slope * mean_bytes
    if latency_s < 0.0:
        latency_s, slope = 0.0, mean_s / mean_bytes
    worst = max(abs(latency_s + slope * size - seconds) / seconds for size, seconds in points)
    return Fit(latency_s, slope, worst)


def tables(report: CollectivesReport) -> list[Table]:
    """Times by size, and the fits with what `firstlight plan --all-reduce-times` takes, and doubts."""
    names = list(report.words)
    by_size: dict[int, dict[str, SizePoint]] = {}
    for point in report.points:
        by_size.setdefault(point.num_bytes, {})[point.carrier] = point
    figures = ("median us", "p99 us", "CPU us")
    columns = ["size", *(f"{name} {figure}" for name in names for figure in figures)]
    rows = []
    for num_bytes, points in by_size.items():
        in_order = (points[name] for name in names)
        cells = [f"{1e6 * s:.1f}" for point in in_order for s in (point.median_s, point.p99_s, point.cpu_s)]
        if len(names) > 1:
            cells.append(f"{points[names[1]].median_s / points[names[0]].median_s:.1f}x")
        rows.append((_size(num_bytes), *cells))
    if len(names) > 1:
        columns.append(f"{names[0]} is faster")
    crowded = ", more than there are cores" if report.num_ranks > report.num_cores else ""
    title = f"all-reduce of {report.num_ranks} ranks on {report.num_cores} cores{crowded}"
    fits = [_fit_row(report, name) for name in names]
    fit_columns = (
        "carrier",
        "latency us",
        "GB/s",
        "fit is off by",
        "for firstlight plan",
        "note",
        "what it is",
    )
    return [plain_table(title, columns, rows), plain_table("latency + size / rate", fit_columns, fits)]


def _fit_row(report: CollectivesReport, name: str) -> tuple[str, ...]:
    found = report.fits[name]
    of_carrier = [point for point in report.points if point.carrier == name]
    chosen = of_carrier[:: max(1, len(of_carrier) // 4)]
    times = ",".join(f"{_size(p.num_bytes, '')}:{1e6 * p.median_s:.0f}" for p in chosen)
    rate, worst = f"{found.bytes_per_s / 1e9:.2f}", f"{100 * found.worst:.0f} %"
    doubt = TOO_NOISY if _is_noisy(found, of_carrier) else ""
    return name, f"{1e6 * found.latency_s:.1f}", rate, worst, times, doubt, report.words[name]


def _is_noisy(found: Fit, points: Sequence[SizePoint]) -> bool:
    drops = (after.median_s < (1 - DROP) * before.median_s for before, after in pairwise(points))
    return found.worst > NOISY or any(drops)


def _size(num_bytes: int, unit: str = "iB") -> str:
    return f"{num_bytes // 2**20}M{unit}" if num_bytes >= 2**20 else f"{num_bytes // 2**10}K{unit}"


def plot(report: CollectivesReport, path: Path) -> None:
    """Small messages, where latency rules, and all of them."""
    panels = [
        Panel(
            title,
            "bytes",
            "median, us",
            {
                name: [
                    (point.num_bytes, 1e6 * point.median_s)
                    for point in report.points
                    if point.carrier == name and point.num_bytes <= most
                ]
                for name in report.words
            },
            is_log_x=True,
        )
        for title, most in (("small messages", SMALL_BYTES), ("all messages", max(SIZES)))
    ]
    save_panels(path, f"all-reduce of {report.num_ranks} ranks", panels)
