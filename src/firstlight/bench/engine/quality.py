"""`firstlight bench quality`: how far the fast layouts are from float32, in KL a token on real texts.

The reference is the same model in float32, which rounds nothing. Invariant: every position of every text
counts once for each number of rows, because a layout may differ by how many rows a step has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
import torch
from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError, why_unreadable
from firstlight.bench.engine.in_process import open_engine
from firstlight.bench.engine.quality_full import (
    Answer,
    LongText,
    answers,
    kl_divergence,
    log_probabilities,
    long_text_report,
    loss_of,
    measure_long_text,
)
from firstlight.bench.measures import percentile
from firstlight.bench.report import plain_table
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.text.model import TextModel

PERPLEXITY_GOAL = 0.005  # how far the perplexity of a long text may be from float32's, as a share
ROWS = (1, 8, 0)  # positions in a step: decoding alone, decoding together, and 0: the whole text, as a prompt
MAX_TEXT_TOKENS, MAX_MODEL_LEN = 512, 1024
_SECTION = EngineSection(max_batched_tokens=MAX_TEXT_TOKENS, kv_memory_bytes=128 * 2**20)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Over all positions, KL(float32 || fast) in nats; `agreement` is the share of equal likeliest tokens."""

    rows_per_step: int
    num_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    agreement: float
    perplexity: float


@dataclass(frozen=True)
class QualityReport:
    """The gap for each number of rows, and what the fast engine says of its layouts."""

    model: str
    num_texts: int
    reference_perplexity: float
    gaps: tuple[Gap, ...]
    layouts: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    goal: float
    long_text: LongText | None = None
    answers: tuple[Answer, ...] = ()

    @property
    def meets_goal(self) -> bool:
        is_close = all(gap.kl_mean <= self.goal for gap in self.gaps)
        return is_close and (self.long_text is None or abs(self.long_text.change) <= PERPLEXITY_GOAL)


@dataclass(frozen=True, kw_only=True)
class QualityOrder:
    """What to compare. `long_text` is a text and its source; what is not given is left out."""

    model: Path
    texts: list[str]
    threads: int = 0
    goal: float = 2e-3
    cpu_kernels: str = "stock"
    kv_dtype: str = "auto"
    long_text: tuple[str, str] | None = None
    questions: tuple[str, ...] = ()


@dataclass
class _Sums:
    """What was seen so far of one number of rows."""

    divergences: list[float]
    num_equal: int = 0
    loss: float = 0.0


def read_texts(path: Path | None = None) -> list[str]:
    """The texts of a file with lines of ---- between them; without one, twenty of many kinds of our own."""
    if path is None:
        content = (
            resources.files("firstlight.bench").joinpath("quality_texts.txt").read_text(encoding="utf-8")
        )
    else:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read the texts in {path}: {why_unreadable(error)}",
                "Give a text file in UTF-8 with --texts.",
            ) from error
    texts = [text.strip("\n") for text in content.split("\n----\n")]
    return [text for text in texts if text.strip()]


def bench_quality(order: QualityOrder, on_progress: Callable[[int, int], None]) -> QualityReport:
    """Loads the model twice, in float32 and in the fast compute type, and compares their logits."""
    model_len = min(MAX_MODEL_LEN, open_checkpoint(order.model).description.max_position)
    section = msgspec.structs.replace(_SECTION, threads=order.threads, max_model_len=model_len)
    encode = TextModel.load(order.model).encode
    exact = open_engine(order.model, "float32", section)
    own = msgspec.structs.replace(section, cpu_kernels=order.cpu_kernels, kv_dtype=order.kv_dtype)
    fast = open_engine(order.model, "auto", own)
    sums = {rows: _Sums([]) for rows in ROWS}
    loss, num_losses = 0.0, 0
    for number, text in enumerate(order.texts, 1):
        tokens = encode(text)[:MAX_TEXT_TOKENS]
        exact_log_TV = log_probabilities(exact, tokens, len(tokens))
        loss += loss_of(exact_log_TV, tokens)
        num_losses += len(tokens) - 1
        for rows, so_far in sums.items():
            _compare(exact_log_TV, log_probabilities(fast, tokens, rows or len(tokens)), tokens, so_far)
        on_progress(number, len(order.texts))
    long_text = None
    if order.long_text is not None:
        tokens = encode(order.long_text[0])
        found = measure_long_text(exact, fast, tokens, on_progress)
        long_text = long_text_report(*order.long_text, len(tokens), found)
    return QualityReport(
        model=str(order.model),
        num_texts=len(order.texts),
        reference_perplexity=math.exp(loss / num_losses),
        gaps=tuple(_gap(rows, so_far, num_losses) for rows, so_far in sums.items()),
        layouts=tuple(fast.report["layouts"]),
        kv_dtypes=tuple(fast.report["kv_dtypes"]),
        goal=order.goal,
        long_text=long_text,
        answers=answers(order.model, list(order.questions), own) if order.questions else (),
    )


def _compare(exact_log_TV: torch.Tensor, fast_log_TV: torch.Tensor, tokens: list[int], sums: _Sums) -> None:
    sums.divergences += kl_divergence(exact_log_TV, fast_log_TV).tolist()
    sums.num_equal += int((exact_log_TV.argmax(-1) == fast_log_TV.argmax(-1)).sum())
    sums.loss += loss_of(fast_log_TV, tokens)


def _gap(rows: int, sums: _Sums, num_losses: int) -> Gap:
    ordered = sorted(sums.divergences)
    return Gap(
        rows_per_step=rows,
        num_tokens=len(ordered),
        kl_mean=math.fsum(ordered) / len(ordered),
        kl_p99=percentile(ordered, 99),
        kl_max=ordered[-1],
        agreement=sums.num_equal / len(ordered),
        perplexity=math.exp(sums.loss / num_losses),
    )


def table(report: QualityReport) -> Table:
    """For people."""
    columns = ("rows a step", "tokens", "KL mean", "KL p99", "KL max", "same argmax", "perplexity")
    rows = [
        (
            str(gap.rows_per_step or "whole text"),
            str(gap.num_tokens),
            f"{gap.kl_mean:.2e}",
            f"{gap.kl_p99:.2e}",
            f"{gap.kl_max:.2e}",
            f"{gap.agreement:.2%}",
            f"{gap.perplexity:.4f}",
        )
        for gap in report.gaps
    ]
    rows.append(
        (
            "float32",
            str(report.gaps[0].num_tokens),
            "0",
            "0",
            "0",
            "100%",
            f"{report.reference_perplexity:.4f}",
        )
    )
    verdict = "met" if report.meets_goal else "NOT met"
    title = (
        f"{report.model} against float32 on {report.num_texts} texts; mean KL of {report.goal:g} is {verdict}"
    )
    return plain_table(title, columns, rows)


def details(report: QualityReport) -> str:
    """The long text and the answers, for people; empty where they were not asked for."""
    lines = []
    if (long := report.long_text) is not None:
        verdict = "met" if abs(long.change) <= PERPLEXITY_GOAL else "NOT met"
        lines += [
            f"perplexity on {long.num_bytes:,} bytes of {long.source}, {long.num_tokens:,} tokens:",
            f"  {long.perplexity:.4f}, float32 {long.reference_perplexity:.4f}: {long.change:+.3%} "
            f"({PERPLEXITY_GOAL:.1%} is {verdict}); KL mean {long.kl_mean:.2e}",
        ]
    if report.answers:
        differing = [one for one in report.answers if one.fast != one.exact]
        lines.append(f"greedy answers: {len(differing)} of {len(report.answers)} differ from float32's")
        for one in differing:
            lines += [f"  {one.question}", f"    fast:    {one.fast!r}", f"    float32: {one.exact!r}"]
    return "\n".join(lines)
