"""`firstlight bench quality`: how far the fast layouts are from float32, in KL a token on real texts.

Called by the cli. The reference is the same model in float32, which rounds nothing. Invariant: every
position of every text counts once for each number of rows, because a layout may differ by how many rows a
step has.
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
from firstlight.bench.in_process import logits_of, open_engine
from firstlight.bench.measures import percentile
from firstlight.bench.report import plain_table
from firstlight.engine.startup import Started
from firstlight.facts.checkpoint import open_checkpoint
from firstlight.text.model import TextModel

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
    goal: float

    @property
    def meets_goal(self) -> bool:
        return all(gap.kl_mean <= self.goal for gap in self.gaps)


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


def bench_quality(
    model: Path, texts: list[str], threads: int, goal: float, on_progress: Callable[[int, int], None]
) -> QualityReport:
    """Loads the model twice, in float32 and in the fast compute type, and compares their logits."""
    model_len = min(MAX_MODEL_LEN, open_checkpoint(model).description.max_position)
    section = msgspec.structs.replace(_SECTION, threads=threads, max_model_len=model_len)
    encode = TextModel.load(model).encode
    exact, fast = open_engine(model, "float32", section), open_engine(model, "auto", section)
    sums = {rows: _Sums([]) for rows in ROWS}
    loss, num_losses = 0.0, 0
    for number, text in enumerate(texts, 1):
        tokens = encode(text)[:MAX_TEXT_TOKENS]
        exact_log_TV = log_probabilities(exact, tokens, len(tokens))  # noqa: N806 - shape suffix
        loss += _loss(exact_log_TV, tokens)
        num_losses += len(tokens) - 1
        for rows, so_far in sums.items():
            _compare(exact_log_TV, log_probabilities(fast, tokens, rows or len(tokens)), tokens, so_far)
        on_progress(number, len(texts))
    return QualityReport(
        model=str(model),
        num_texts=len(texts),
        reference_perplexity=math.exp(loss / num_losses),
        gaps=tuple(_gap(rows, so_far, num_losses) for rows, so_far in sums.items()),
        layouts=tuple(fast.report["layouts"]),
        goal=goal,
    )


def log_probabilities(engine: Started, tokens: list[int], rows_per_step: int) -> torch.Tensor:
    """At every position, float64 [T, V]: a gap of 1e-4 must not drown in the rounding of the comparison."""
    return logits_of(engine, tokens, rows_per_step).double().log_softmax(-1)


def kl_divergence(exact_log_TV: torch.Tensor, other_log_TV: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """KL(exact || other) of each row, in nats: [T]."""
    return (exact_log_TV.exp() * (exact_log_TV - other_log_TV)).sum(-1)


def _compare(exact_log_TV: torch.Tensor, fast_log_TV: torch.Tensor, tokens: list[int], sums: _Sums) -> None:  # noqa: N803
    sums.divergences += kl_divergence(exact_log_TV, fast_log_TV).tolist()
    sums.num_equal += int((exact_log_TV.argmax(-1) == fast_log_TV.argmax(-1)).sum())
    sums.loss += _loss(fast_log_TV, tokens)


def _loss(log_TV: torch.Tensor, tokens: list[int]) -> float:  # noqa: N803
    """Of each text's tokens after the first, summed, in nats."""
    following = torch.tensor(tokens[1:])
    return -float(log_TV[:-1].gather(1, following[:, None]).sum())


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
