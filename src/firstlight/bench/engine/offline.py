"""`firstlight bench offline`: prefill and decode of the engine in this process, over batch and length.

Beside tokens a second it says which share of the machine's measured memory bandwidth and matrix rate that is.
Invariant: the bytes and operations counted are those the checkpoint makes necessary (each weight as the file
has it, read once a step; the KV of the context), whatever layout the engine uses, so that figures of
different layouts can be compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError
from firstlight.bench.engine.in_process import open_engine
from firstlight.bench.machine.machine_rates import MachineRates, measure_rates
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.planning.memory_budget import kv_bytes_per_token
from firstlight.ops.kv_rows import row_bytes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERTS = ".experts."


@dataclass(frozen=True, kw_only=True)
class OfflineOrder:
    """What to sweep: `decode_steps` at each batch and length, `rounds` prompts at each length."""

    model: Path
    dtype: str = "auto"
    threads: int = 0
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    lengths: tuple[int, ...] = (64, 512)
    decode_steps: int = 32
    rounds: int = 5

    @property
    def section(self) -> EngineSection:
        """An engine whose pool holds the largest point of the sweep."""
        model_len = max(self.lengths) + self.decode_steps + 3
        description = open_checkpoint(self.model).description
        if model_len > description.max_position:
            raise UsageError(
                f"a length of {max(self.lengths)} and the decoded tokens pass the model's "
                f"{description.max_position} positions.",
                "Give smaller --length.",
            )
        pages = -(-model_len // EngineSection().page_size_tokens) * (max(self.batches) + 1)
        widest = 4 * description.head_size
        page_bytes = kv_bytes_per_token(description, (widest, widest)) * EngineSection().page_size_tokens
        return EngineSection(
            threads=self.threads,
            max_model_len=model_len,
            max_num_seqs=max(self.batches),
            max_batched_tokens=max(512, *self.batches),
            kv_memory_bytes=pages * page_bytes,
            prefix_cache=False,
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement, a median. Prefill takes in a whole prompt, a decode step one token a sequence."""

    kind: str  # "prefill" or "decode"
    batch: int
    length: int
    step_s: float
    tokens_per_s: float
    bytes_per_s: float
    bandwidth_share: float
    flops: float
    matrix_share: float


@dataclass(frozen=True)
class OfflineReport:
    """The machine's rates at the start and at the end (it may be shared), and the points between."""

    model: str
    engine: dict[str, Any]
    rates_before: MachineRates
    rates_after: MachineRates
    points: tuple[Point, ...]


class Work:
    """Bytes and operations that the model makes necessary.

    Of experts those that tokens choose, as if each choice were independent of the others.
    """

    def __init__(self, checkpoint: Checkpoint, kv_row_bytes: tuple[int, ...]) -> None:
        description = checkpoint.description
        latent, experts = description.latent, description.experts
        head = _EMBEDDING if description.tie_embeddings else _HEAD
        read = [t for t in checkpoint.tensors.values() if t.name != _EMBEDDING or description.tie_embeddings]
        self.weight_bytes = sum(tensor.nbytes for tensor in read)
        self._chosen = 1.0 if experts is None else experts.num_chosen / experts.num
        self._expert_bytes = sum(t.nbytes for t in read if _EXPERTS in t.name)
        matrices = [t for t in read if len(t.shape) == 2 and t.name != head]
        self.layer_flops = 2 * sum(
            math.prod(t.shape) * (self._chosen if _EXPERTS in t.name else 1) for t in matrices
        )
        self.head_flops = 2 * description.vocab_size * description.hidden_size
        heads = None if latent is None else 1
        self.kv_token_bytes = kv_bytes_per_token(description, kv_row_bytes, heads)
        # Scores and weighted values: a product and a sum each, for every token looked at.
        seen = 2 * description.head_size if latent is None else 2 * latent.latent_size + latent.rope_size
        self.attention_flops = 2 * description.num_layers * description.num_heads * seen

    def decode(self, batch: int, context: float) -> tuple[float, float]:
        """(bytes, operations) of a step that gives each of `batch` sequences a token."""
        flops = batch * (self.layer_flops + self.head_flops + self.attention_flops * context)
        return self._read_bytes(batch) + batch * context * self.kv_token_bytes, flops

    def prefill(self, length: int) -> tuple[float, float]:
        """(bytes, operations) of taking in a prompt and sampling once after it."""
        flops = length * (self.layer_flops + self.attention_flops * length / 2) + self.head_flops
        return self._read_bytes(length) + length * self.kv_token_bytes, flops

    def _read_bytes(self, num_tokens: int) -> float:
        """Weights that so many tokens read: an expert that none of them chose is not."""
        unread = (1.0 - self._chosen) ** num_tokens
        return self.weight_bytes - unread * self._expert_bytes


def bench_offline(order: OfflineOrder, on_progress: Callable[[int, int], None]) -> OfflineReport:
    """Loads the model and runs the sweep."""
    engine = open_engine(order.model, order.dtype, order.section)
    checkpoint = engine.checkpoint
    size, latent = checkpoint.description.head_size, checkpoint.description.latent
    dtypes = [getattr(torch, name) for name in engine.report["kv_dtypes"]]
    if latent is not None:
        size, dtypes = latent.latent_size + latent.rope_size, dtypes[:1]
    work = Work(checkpoint, tuple(row_bytes(size, dtype) for dtype in dtypes))
    sweep = Sweep(engine.core(engine.runner.run), work, measure_rates(), checkpoint.description.vocab_size)
    points: list[Point] = []
    num_points = len(order.lengths) * (1 + len(order.batches))
    for length in order.lengths:
        points.append(sweep.prefill(length, order.rounds))
        on_progress(len(points), num_points)
        for batch in order.batches:
            points.append(sweep.decode(batch, length, order.decode_steps))
            on_progress(len(points), num_points)
    return OfflineReport(str(order.model), engine.report, sweep.rates, measure_rates(), tuple(points))


class Sweep:
    """Drives an idle engine through one point after the other."""

    def __init__(self, core: EngineCore, work: Work, rates: MachineRates, vocab_size: int) -> None:
        self._core, self._work, self.rates, self._vocab_size = core, work, rates, vocab_size
        self._draw = random.Random(0)
        self._num_requests = 0

    def prefill(self, length: int, rounds: int) -> Point:
        """The median of `rounds` prompts, after one that warms up."""
        times_s = []
        for _ in range(rounds + 1):
            self._submit(length, 1)
            start_s = perf_counter()
            while self._core.has_work:
                self._core.step()
            times_s.append(perf_counter() - start_s)
        return self._point("prefill", 1, length, median(times_s[1:]))

    def decode(self, batch: int, length: int, num_steps: int) -> Point:
        """The median of `num_steps` steps in which all of `batch` sequences decode."""
        for _ in range(batch):
            self._submit(length, num_steps + 2)
        times_s: list[float] = []
        while self._core.has_work and len(times_s) <= num_steps:
            start_s = perf_counter()
            outputs = self._core.step()
            step_s = perf_counter() - start_s
            if outputs is not None and outputs.stats.step_tokens == outputs.stats.step_sequences == batch:
                times_s.append(step_s)
        self._core.scheduler.abort_all()
        self._core.scheduler.take_finished()
        return self._point("decode", batch, length, median(times_s[1:]))

    def _submit(self, length: int, num_new: int) -> None:
        self._num_requests += 1
        prompt = self._draw.choices(range(self._vocab_size), k=length)
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, seed=0)
        self._core.handle(Submit(f"bench-{self._num_requests}", prompt, params))

    def _point(self, kind: str, batch: int, length: int, step_s: float) -> Point:
        work = self._work
        nbytes, flops = work.prefill(length) if kind == "prefill" else work.decode(batch, length)
        return Point(
            kind=kind,
            batch=batch,
            length=length,
            step_s=step_s,
            tokens_per_s=(length if kind == "prefill" else batch) / step_s,
            bytes_per_s=nbytes / step_s,
            bandwidth_share=nbytes / step_s / self.rates.read_bytes_per_s,
            flops=flops / step_s,
            matrix_share=flops / step_s / self.rates.best_flops,
        )


def tables(report: OfflineReport) -> list[Table]:
    """For people."""
    columns = (
        "",
        "batch",
        "length",
        "step ms",
        "tokens/s",
        "GB/s",
        "of bandwidth",
        "GFLOP/s",
        "of matrix rate",
    )
    title = f"{report.model}: {report.engine['backend']}, {report.engine['threads']} threads"
    return [
        plain_table("this machine, measured now", ("", "before", "after"), _rate_rows(report)),
        plain_table(title, columns, [_row(point) for point in report.points]),
    ]


def _rate_rows(report: OfflineReport) -> list[Sequence[str]]:
    both = (report.rates_before, report.rates_after)
    rows: list[Sequence[str]] = [("read GB/s", *(f"{rates.read_bytes_per_s / 1e9:.1f}" for rates in both))]
    rows += [
        (f"{name} product GFLOP/s", *(f"{rates.matrix_flops[name] / 1e9:.0f}" for rates in both))
        for name in report.rates_before.matrix_flops
    ]
    return rows


def _row(point: Point) -> tuple[str, ...]:
    return (
        point.kind,
        str(point.batch),
        str(point.length),
        f"{point.step_s * 1e3:.2f}",
        f"{point.tokens_per_s:,.1f}",
        f"{point.bytes_per_s / 1e9:.1f}",
        f"{point.bandwidth_share:.0%}",
        f"{point.flops / 1e9:.1f}",
        f"{point.matrix_share:.0%}",
    )


def plot(report: OfflineReport, path: Path) -> None:
    """A picture: decode by batch, prefill by length, and the shares."""
    from firstlight.bench.plots import Panel, save_panels

    decode = [point for point in report.points if point.kind == "decode"]
    prefill = [point for point in report.points if point.kind == "prefill"]
    speed: dict[str, list[tuple[float, float]]] = {}
    share: dict[str, list[tuple[float, float]]] = {}
    for point in decode:
        speed.setdefault(f"length {point.length}", []).append((point.batch, point.tokens_per_s))
        share.setdefault(f"length {point.length}", []).append((point.batch, point.bandwidth_share * 100))
    panels = [
        Panel("decode", "sequences", "tokens/s", speed, is_log_x=True),
        Panel("decode: share of read bandwidth", "sequences", "%", share, is_log_x=True),
        Panel(
            "prefill",
            "tokens",
            "tokens/s",
            {"": [(p.length, p.tokens_per_s) for p in prefill]},
            is_log_x=True,
        ),
    ]
    save_panels(path, f"{report.model}: {report.engine['backend']}", panels)
