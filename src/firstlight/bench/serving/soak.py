"""`firstlight bench soak`: mixed traffic for a while, then: is every page free again, and is memory flat?

Invariant: it passes only if nothing failed, nothing was left in the engine, the log holds no traceback and
memory did not grow after the first quarter of the time.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from firstlight.base.errors import EngineError
from firstlight.bench.measures import peak_growth
from firstlight.bench.report import facts_table
from firstlight.bench.serving.http_client import HttpClient
from firstlight.bench.serving.server_process import ServerProcess
from firstlight.bench.serving.serving import fast_loop
from firstlight.bench.serving.soak_traffic import Subject, Traffic

_SAME_VERSION = "Use a server of this version of firstlight."

WARMUP_SHARE = 0.25  # of the time; meanwhile the KV pool is touched for the first time
IDLE_DEADLINE_S = 20.0
GROWTH_SHARE, GROWTH_BYTES = 0.02, 16 * 2**20  # allowed: the larger one
_GAUGES = ("requests_running", "requests_waiting", "kv_pages_used")
_VALUE = r"^firstlight:{name} (\S+)$"


@dataclass(frozen=True, kw_only=True)
class SoakOrder:
    """How long, by how many clients, on which model."""

    model: Path
    minutes: float = 20.0
    clients: int = 16
    seed: int = 0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """What happened; it passed if there are no `problems`. `memory` is (second, bytes of PSS)."""

    model: str
    duration_s: float
    outcomes: dict[str, int]
    failures: dict[str, int]
    left_over: dict[str, float]
    memory: list[tuple[float, float]]
    growth_bytes: float
    allowed_growth_bytes: float
    problems: list[str]


def bench_soak(order: SoakOrder, on_progress: Callable[[int, int], None]) -> SoakReport:
    """Starts the server, soaks it and judges. `on_progress` hears seconds."""
    with ServerProcess([str(order.model), *order.flags]) as server:
        server.wait_until_ready()
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(_soak(order, server, on_progress))


async def _soak(
    order: SoakOrder, server: ServerProcess, on_progress: Callable[[int, int], None]
) -> SoakReport:
    client = HttpClient(server.url)
    memory: list[tuple[float, float]] = []
    start_s = time.monotonic()
    end_s = start_s + order.minutes * 60
    try:
        traffic = Traffic(client, await _subject(client), order.seed)
        watcher = asyncio.create_task(_watch(server, memory, start_s, end_s, on_progress))
        await traffic.run(order.clients, end_s)
        await watcher
        left_over = await _left_over(client)
    finally:
        await client.close()
    settled = [(second, value) for second, value in memory if second >= order.minutes * 60 * WARMUP_SHARE]
    mean = sum(value for _, value in settled) / max(1, len(settled))
    report = SoakReport(
        model=str(order.model),
        duration_s=time.monotonic() - start_s,
        outcomes=dict(traffic.outcomes),
        failures=dict(traffic.failures.most_common(10)),
        left_over=left_over,
        memory=memory,
        growth_bytes=peak_growth(settled),
        allowed_growth_bytes=max(GROWTH_SHARE * mean, GROWTH_BYTES),
        problems=[],
    )
    report.problems.extend(problems(report, server.log()))
    return report


def problems(report: SoakReport, log: str) -> list[str]:
    """Why the soak did not pass; empty if it did."""
    found = [f"{count} requests failed: {reason}" for reason, count in report.failures.items()]
    found += [f"{name} is {value:g} when all is over" for name, value in report.left_over.items() if value]
    if report.growth_bytes > report.allowed_growth_bytes:
        found.append(
            f"the peak of memory grew by {report.growth_bytes / 1e6:.1f} MB after the warm-up; "
            f"{report.allowed_growth_bytes / 1e6:.1f} MB are allowed"
        )
    if not report.outcomes.get("completed"):
        found.append("no request was completed")
    if num := log.count("Traceback (most recent call last)"):
        found.append(f"{num} tracebacks in the server's log")
    return found


async def _subject(client: HttpClient) -> Subject:
    models = msgspec.json.decode((await client.request("GET", "/v1/models")).body)
    info = msgspec.json.decode((await client.request("GET", "/server_info")).body)
    return Subject(
        models["data"][0]["id"], info["max_model_len"], info["vocab_size"], info["has_chat_template"]
    )


async def _watch(
    server: ServerProcess,
    memory: list[tuple[float, float]],
    start_s: float,
    end_s: float,
    on_progress: Callable[[int, int], None],
) -> None:
    """Notes the memory about two hundred times, but at most once a second."""
    interval_s = max(1.0, (end_s - start_s) / 200)
    while (now_s := time.monotonic()) < end_s:
        memory.append((now_s - start_s, float(await asyncio.to_thread(server.pss_bytes))))
        on_progress(int(now_s - start_s), int(end_s - start_s))
        await asyncio.sleep(min(interval_s, end_s - now_s))


async def _left_over(client: HttpClient) -> dict[str, float]:
    """What the engine still holds once it had time to notice the last client's going."""
    deadline_s = time.monotonic() + IDLE_DEADLINE_S
    while True:
        reply = await client.request("GET", "/metrics")
        values = read_gauges(reply.body.decode(), _GAUGES)
        if not any(values.values()) or time.monotonic() > deadline_s:
            return values
        await asyncio.sleep(0.1)


def read_gauges(text: str, names: Sequence[str]) -> dict[str, float]:
    """Values from Prometheus' text form. Raises `EngineError` for one that is not there."""
    values = {}
    for name in names:
        found = re.search(_VALUE.format(name=re.escape(name)), text, re.MULTILINE)
        if found is None:
            raise EngineError(f"/metrics does not tell firstlight:{name}", _SAME_VERSION)
        values[name] = float(found[1])
    return values


def table(report: SoakReport) -> Table:
    """For people."""
    last = report.memory[-1][1] / 1e6 if report.memory else 0.0
    rows = [
        ("duration", f"{report.duration_s / 60:.1f} min"),
        *((name, str(count)) for name, count in sorted(report.outcomes.items())),
        *((name.replace("_", " "), f"{value:g} at the end") for name, value in report.left_over.items()),
        ("memory", f"{last:,.0f} MB (PSS) at the end"),
        ("growth", f"{report.growth_bytes / 1e6:+.1f} MB after the warm-up, peak to peak"),
        *(("problem", problem) for problem in report.problems),
    ]
    verdict = "NOT passed" if report.problems else "passed"
    return facts_table(f"soak of {report.model}: {verdict}", rows)


def plot(report: SoakReport, path: Path) -> None:
    """A picture: memory over time."""
    from firstlight.bench.plots import Panel, save_panels

    points = [(second / 60, value / 1e6) for second, value in report.memory]
    title = (
        f"soak: {'NOT passed' if report.problems else 'passed'}, growth {report.growth_bytes / 1e6:+.1f} MB"
    )
    save_panels(path, title, [Panel("memory of all processes", "minute", "MB (PSS)", {"": points})])
