"""`firstlight bench startup`: from the launch to the port, to ready and to the first token, by phase.

Invariant: every run is a new process, and the report says whether the model's file was in the page cache.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.table import Table

from firstlight.base.blackbox.reader import PhaseRecord
from firstlight.base.errors import EngineError
from firstlight.base.phases import READY, SERVING
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.bench.serving.server_process import ServerProcess

LAUNCH = "launch"  # from the launch to the first word of rank 0
ANSWER = "answer"  # from rank 0 being ready to the public port saying so


@dataclass(frozen=True)
class StartupRun:
    """Seconds from the launch; `phases_s` are durations and add up to `ready_s`."""

    port_s: float
    ready_s: float
    first_token_s: float
    phases_s: dict[str, float]
    pss_bytes: int


@dataclass(frozen=True)
class StartupReport:
    """Runs in the order they were made. `disk`: "warm" or "cold"."""

    model: str
    disk: str
    runs: tuple[StartupRun, ...]


def bench_startup(
    model: Path, flags: Sequence[str], num_runs: int, *, cold: bool, on_run: Callable[[int, int], None]
) -> StartupReport:
    """Launches `firstlight serve` `num_runs` times. `cold` drops the model from the page cache each time."""
    runs = []
    if not cold:
        _read_all(model)
    for number in range(1, num_runs + 1):
        if cold:
            _drop_from_page_cache(model)
        runs.append(_run(model, flags))
        on_run(number, num_runs)
    return StartupReport(str(model), "cold" if cold else "warm", tuple(runs))


def _run(model: Path, flags: Sequence[str]) -> StartupRun:
    with ServerProcess([str(model), *flags]) as server:
        port_s = server.wait_for_port()
        ready_s = server.wait_until_ready()
        phases = server.phases()
        _first_token(server.port)
        return StartupRun(
            port_s=port_s,
            ready_s=ready_s,
            first_token_s=time.monotonic() - server.started_s,
            phases_s=phase_durations(phases, server.started_s, server.started_s + ready_s),
            pss_bytes=server.pss_bytes(),
        )


def phase_durations(phases: Sequence[PhaseRecord], launched_s: float, ready_s: float) -> dict[str, float]:
    """How long rank 0 was in each phase, from the launch until the port said ready. All on one clock."""
    entered = [(LAUNCH, launched_s)]
    for phase in phases:
        if phase.name == SERVING:
            break
        if phase.name != entered[-1][0]:
            entered.append((ANSWER if phase.name == READY else phase.name, phase.start_s))
    durations: dict[str, float] = {}
    for (name, start_s), (_, end_s) in pairwise([*entered, ("", ready_s)]):
        durations[name] = durations.get(name, 0.0) + max(0.0, end_s - start_s)
    return durations


def _first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    try:
        connection.request("GET", "/v1/models")
        body["model"] = msgspec.json.decode(connection.getresponse().read())["data"][0]["id"]
        connection.request(
            "POST", "/v1/completions", msgspec.json.encode(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        text = reply.read()
    finally:
        connection.close()
    if reply.status != 200:
        raise EngineError(
            f"the first request was answered {reply.status}: {text[:300]!r}", "Look at what it said."
        )


def _files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def _read_all(model: Path) -> None:
    for path in _files(model):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _drop_from_page_cache(model: Path) -> None:
    for path in _files(model):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def table(report: StartupReport) -> Table:
    """For people: medians over the runs, and the fastest and slowest."""
    phases = list(dict.fromkeys(phase for run in report.runs for phase in run.phases_s))
    rows = [
        _row("port open", [run.port_s for run in report.runs]),
        _row("ready", [run.ready_s for run in report.runs]),
        _row("first token", [run.first_token_s for run in report.runs]),
        *(_row(f"  {phase}", [run.phases_s.get(phase, 0.0) for run in report.runs]) for phase in phases),
    ]
    memory = median(run.pss_bytes for run in report.runs) / 1e6
    title = f"start of {report.model}, {report.disk} disk, {len(report.runs)} runs, {memory:,.0f} MB (PSS)"
    return plain_table(title, ("seconds", "median", "least", "most"), rows)


def _row(name: str, values: list[float]) -> tuple[str, ...]:
    return (name, *(f"{value:.3f}" for value in (median(values), min(values), max(values))))


def plot(report: StartupReport, path: Path) -> None:
    """A picture: the median of each phase."""
    from firstlight.bench.plots import Bars, save_panels

    phases = list(dict.fromkeys(phase for run in report.runs for phase in run.phases_s))
    bars = {phase: median(run.phases_s.get(phase, 0.0) for run in report.runs) for phase in phases}
    ready_s = median(run.ready_s for run in report.runs)
    save_panels(path, f"start of {report.model}: ready in {ready_s:.2f} s", [Bars("phases", "seconds", bars)])
