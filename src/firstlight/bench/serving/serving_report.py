"""From the records of a load to its report: distributions, throughput, goodput, and the picture of them.

Invariant: rates are over the whole measured time, from the first request due to the last one answered, and
failed requests are counted beside them, never left out silently.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from firstlight.bench.measures import RequestRecord, Summary, meets, summarize
from firstlight.bench.report import SUMMARY_COLUMNS, facts_table, plain_table, summary_row


@dataclass(frozen=True)
class Outcome:
    """What a load left behind. `client_cpu_s` is the processor time that this process took."""

    records: tuple[RequestRecord, ...]
    start_s: float
    duration_s: float
    client_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """Latencies in seconds, rates per second."""

    model: str
    api: str
    loop: str
    num_requests: int
    num_errors: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    counted_by: str  # "usage" of the server, or "chunks" where it sends none
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Summary | None
    tpot_s: Summary | None
    itl_s: Summary | None
    e2e_s: Summary | None
    tokens_per_chunk: float | None
    limits_ms: dict[str, float]
    goodput_per_s: float | None
    most_late_s: float
    client_cpu_share: float  # of one core
    client_us_per_chunk: float | None
    timeline: list[tuple[float, float]]  # (second, chunks with text in it)

    @property
    def prefix_cache(self) -> str:
        """How warm the server's prefix cache was for these prompts."""
        if not self.prompt_tokens:
            return "unknown: the server counts no prompt tokens"
        share = self.cached_tokens / self.prompt_tokens
        return f"{self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens came from it ({share:.1%})"


def make_report(
    outcome: Outcome, *, model: str, api: str, loop: str, limits_ms: dict[str, float]
) -> ServingReport:
    """The numbers of a finished load."""
    good = [record for record in outcome.records if record.error is None]
    errors = Counter(record.error for record in outcome.records if record.error is not None)
    output_tokens = sum(record.num_output_tokens for record in good)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    num_chunks = sum(len(record.text_times_s) for record in good)
    duration_s = outcome.duration_s
    num_met = sum(meets(record, limits_ms) for record in good)
    return ServingReport(
        model=model,
        api=api,
        loop=loop,
        num_requests=len(outcome.records),
        num_errors=len(outcome.records) - len(good),
        errors=dict(errors.most_common(10)),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.num_cached_tokens for record in good),
        output_tokens=output_tokens,
        counted_by="usage" if all(record.has_usage for record in good) else "chunks",
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) / duration_s,
        ttft_s=summarize(record.ttft_s for record in good),
        tpot_s=summarize(value for record in good if (value := record.tpot_s) is not None),
        itl_s=summarize(gap for record in good for gap in record.gaps_s),
        e2e_s=summarize(record.e2e_s for record in good),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        limits_ms=limits_ms,
        goodput_per_s=num_met / duration_s if limits_ms else None,
        most_late_s=max((record.late_s for record in good), default=0.0),
        client_cpu_share=outcome.client_cpu_s / duration_s,
        client_us_per_chunk=outcome.client_cpu_s / num_chunks * 1e6 if num_chunks else None,
        timeline=_timeline(good, outcome.start_s),
    )


def _timeline(records: list[RequestRecord], start_s: float) -> list[tuple[float, float]]:
    seconds = Counter(int(time_s - start_s) for record in records for time_s in record.text_times_s)
    return [(float(second), float(seconds[second])) for second in range(max(seconds, default=-1) + 1)]


def tables(report: ServingReport) -> list[Table]:
    """For people."""
    latencies = [
        summary_row("time to first token", report.ttft_s, 1e3),
        summary_row("time per output token", report.tpot_s, 1e3),
        summary_row("between chunks", report.itl_s, 1e3),
        summary_row("end to end", report.e2e_s, 1e3),
    ]
    return [
        facts_table(f"{report.model} ({report.api}), {report.loop}", _facts(report)),
        plain_table("latency, ms", ("", *SUMMARY_COLUMNS), latencies),
    ]


def _facts(report: ServingReport) -> list[tuple[str, str]]:
    ratio = "-" if report.tokens_per_chunk is None else f"{report.tokens_per_chunk:.2f}"
    cost = "" if report.client_us_per_chunk is None else f", {report.client_us_per_chunk:.0f} µs a chunk"
    rows = [
        ("requests", f"{report.num_requests - report.num_errors} answered, {report.num_errors} failed"),
        ("duration", f"{report.duration_s:.2f} s"),
        ("requests/s", f"{report.requests_per_s:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:,.1f} ({report.output_tokens:,} in all)"),
        ("total tokens/s", f"{report.total_tokens_per_s:,.1f}"),
        ("tokens a chunk", f"{ratio} (tokens by {report.counted_by})"),
        ("prefix cache", report.prefix_cache),
        ("this client", f"{report.client_cpu_share:.1%} of a core{cost}"),
    ]
    if report.goodput_per_s is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in report.limits_ms.items())
        rows.append(("goodput/s", f"{report.goodput_per_s:.2f} within {limits} ms"))
    if report.most_late_s > 0.05:
        rows.append(("sent late", f"by up to {report.most_late_s * 1e3:.0f} ms: this client was too slow"))
    rows += [(f"error x{count}", text) for text, count in report.errors.items()]
    return rows


def plot(report: ServingReport, path: Path) -> None:
    """A picture: the distributions by percentile, and chunks a second over time."""
    from firstlight.bench.plots import Panel, save_panels

    shown = (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("ITL", report.itl_s), ("E2E", report.e2e_s))
    panels = [
        Panel(name, "percentile", "ms", {"": [(float(p), v * 1e3) for p, v in summary.percentiles.items()]})
        for name, summary in shown
        if summary is not None
    ]
    panels.append(Panel("chunks received", "second", "chunks/s", {"": report.timeline}))
    rate = f"{report.output_tokens_per_s:,.0f} output tokens/s"
    save_panels(path, f"{report.model}: {report.loop}, {rate}", panels)
