"""`firstlight bench speculation`: the same answers with each drafter and without, side by side.

Each drafter has an engine of its own in this process, and all take their turns in every round, so that a
noisy machine is noisy for all. An answer ends where it would begin to repeat itself: loops are easy to guess.
Invariant: a speed stands beside the acceptance and the k it came with, and beside whether the answers were
the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.base.draft_tree import NGRAM
from firstlight.base.errors import UsageError
from firstlight.bench.engine.in_process import open_engine
from firstlight.bench.engine.speculation_subjects import WITHOUT, Asked, Engine, Server, Subject
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.drafter import families
from firstlight.drafter.loops import loop_start
from firstlight.drafter.prompt_files import read_prompt_file
from firstlight.engine.speculation.shape import NOTHING, Shape, chain
from firstlight.engine.speculation.shipped import with_shipped_drafter
from firstlight.engine.worker.step_times import measure_step_times
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.text.model import TextModel

MAX_PROMPT_TOKENS = 512
Groups = dict[str, list[list[dict[str, Any]]]]
SHORTEST_ANSWER = 8  # what is left of an answer without its loop must be worth timing


@dataclass(frozen=True, kw_only=True)
class SpeculationOrder:
    """What to compare: `drafters` with each of `draft_tokens`, on `prompts_each` prompts of each group.

    Without any: n-gram lookup, and the drafter that comes with the embedded model.
    """

    model: Path
    drafters: tuple[str, ...] = ()
    draft_tokens: tuple[int, ...] = (3,)
    trees: tuple[Shape, ...] = ()  # also, with each drafter that makes trees
    adapt: bool = True
    beside: tuple[str, ...] = ()  # servers that answer, too
    files: tuple[Path, ...] = ()
    prompts_each: int = 8
    answer_tokens: int = 128
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    rounds: int = 7
    threads: int = 0
    cpu_kernels: str = "auto"

    @cached_property
    def max_prompt_tokens(self) -> int:
        """Longer prompts are left out."""
        room = open_checkpoint(self.model).description.max_position - self.answer_tokens - 1
        if room < 1:
            raise UsageError(
                f"the model has no room for {self.answer_tokens} tokens.", "Give fewer --tokens."
            )
        return min(MAX_PROMPT_TOKENS, room)

    def section(self, drafter: str, shape: Shape) -> EngineSection:
        """An engine of this comparison."""
        return EngineSection(
            threads=self.threads,
            cpu_kernels=self.cpu_kernels,
            max_model_len=self.max_prompt_tokens + self.answer_tokens + 1,
            max_num_seqs=max(self.batches),
            prefix_cache=False,
            drafter=drafter,
            draft_tokens=max(shape.depth, 1),
            draft_top_k=shape.top_k,
            draft_nodes=shape.nodes if shape.is_tree else 0,
            draft_adapt=self.adapt,
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One subject on one group of prompts at one batch size.

    `ratio`: the median over rounds of its speed by that of our engine without a drafter in the same round.
    `same_answers`: None for a server, whose arithmetic is its own.
    """

    group: str
    batch: int
    drafter: str
    draft_tokens: int
    draft_top_k: int
    draft_nodes: int
    tokens_per_s: float
    ratio: float
    low: float
    high: float
    same_answers: int | None
    answers: int
    drafts: dict[str, Any]


@dataclass(frozen=True)
class SpeculationReport:
    """`step_times_s`: of m rows, as each engine measured it when it started."""

    model: str
    rounds: int
    adapt: bool
    engine: dict[str, Any]
    step_times_s: dict[str, dict[int, float]]
    points: tuple[Point, ...]


def bench_speculation(order: SpeculationOrder, on_progress: Callable[[int, int], None]) -> SpeculationReport:
    """Runs the comparison; takes minutes. Raises `UsageError`s before anything is loaded, where it can."""
    groups = _groups(order)
    subjects, report = _open(order)
    try:
        points = _points(order, groups, subjects, on_progress)
    finally:
        for subject in subjects:
            subject.close()
    times_s = {s.name: dict(s.times_s) for s in subjects if isinstance(s, Engine)}
    return SpeculationReport(str(order.model), order.rounds, order.adapt, report, times_s, tuple(points))


def _points(
    order: SpeculationOrder, groups: Groups, subjects: list[Subject], on_progress: Callable[[int, int], None]
) -> list[Point]:
    text = TextModel.load(order.model)
    points: list[Point] = []
    done, total = 0, len(groups) * len(order.batches) * order.rounds
    for group, conversations in groups.items():
        prompts = _measured_prompts(order, text, conversations, subjects)
        for batch in order.batches:
            for subject in subjects:
                subject.forget()
            for number in range(order.rounds):
                _round(subjects, prompts, batch, number)
                done += 1
                on_progress(done, total)
            points += [_point(group, batch, subject, subjects[0]) for subject in subjects]
    return points


def _round(subjects: Sequence[Subject], prompts: Sequence[Asked], batch: int, number: int) -> None:
    """Every subject once, each round beginning with another one."""
    first = number % len(subjects)
    for subject in [*subjects[first:], *subjects[:first]]:
        chosen = [prompts[place % len(prompts)] for place in range(max(batch, len(prompts)))]
        speeds = [subject.answer(chosen[at : at + batch]) for at in range(0, len(chosen), batch)]
        subject.speeds.append(len(speeds) / sum(1.0 / speed for speed in speeds))


def _groups(order: SpeculationOrder) -> Groups:
    """Conversations by group: the families that no drafter of ours was trained on, and the files given."""
    if order.files:
        return {
            path.stem: [asked.messages for asked in read_prompt_file(path)][: order.prompts_each]
            for path in order.files
        }
    rng = random.Random(20)
    groups: Groups = {}
    for name in families.HELD_OUT:
        texts = {families.TEMPLATES[name](rng): None for _ in range(20 * order.prompts_each)}
        groups[name] = [[{"role": "user", "content": text}] for text in list(texts)[: order.prompts_each]]
    return groups


def _open(order: SpeculationOrder) -> tuple[list[Subject], dict[str, Any]]:
    """The subjects, that without a drafter first, and its report."""
    wanted = [(WITHOUT, NOTHING)]
    for drafter in order.drafters or _default_drafters(order):
        wanted += [(drafter, chain(num)) for num in order.draft_tokens]
        wanted += [(drafter, tree) for tree in order.trees if drafter != NGRAM]
    subjects: list[Subject] = [Server(url) for url in order.beside]
    reports = []
    for place, (drafter, shape) in enumerate(wanted):
        started = open_engine(order.model, "auto", order.section(drafter, shape))
        core = started.core(started.runner.run)
        times_s = measure_step_times(core, started.checkpoint.description.vocab_size)
        subjects.insert(place, Engine(drafter, shape, core, times_s))
        reports.append(started.report)
    return subjects, reports[0]


def _default_drafters(order: SpeculationOrder) -> list[str]:
    shipped, _ = with_shipped_drafter(EngineSection(), open_checkpoint(order.model))
    return [NGRAM] if shipped.drafter is None else [NGRAM, shipped.drafter]


def _measured_prompts(
    order: SpeculationOrder,
    text: TextModel,
    conversations: Sequence[Sequence[Any]],
    subjects: Sequence[Subject],
) -> list[Asked]:
    """The prompts, and how long each answer of the first subject is before it ends or repeats itself.

    All subjects answer: whose memory was touched before has an advantage of some hundredths.
    """
    encoded = [text.encode(text.render_chat(m), add_special_tokens=False) for m in conversations]
    most = order.max_prompt_tokens
    fitting = [tokens for tokens in encoded if len(tokens) <= most]
    for subject in subjects:
        subject.forget()
        for tokens in fitting:
            subject.answer([Asked(tokens, order.answer_tokens)], ignore_eos=False)
    prompts = []
    for tokens, answer in zip(fitting, subjects[0].answers, strict=True):
        loop = loop_start(answer)
        num_answer = len(answer) if loop is None else loop
        if num_answer >= SHORTEST_ANSWER:
            prompts.append(Asked(tokens, num_answer))
    if not prompts:
        raise UsageError("no prompt has an answer that could be timed.", "Give other prompts.")
    return prompts


def _point(group: str, batch: int, subject: Subject, plain: Subject) -> Point:
    ratios = [mine / its for mine, its in zip(subject.speeds, plain.speeds, strict=True)]
    same: int | None = None
    if isinstance(subject, Engine):
        same = sum(mine == its for mine, its in zip(subject.answers, plain.answers, strict=True))
    return Point(
        group=group,
        batch=batch,
        drafter=subject.drafter,
        draft_tokens=subject.shape.depth,
        draft_top_k=subject.shape.top_k,
        draft_nodes=subject.shape.nodes,
        tokens_per_s=median(subject.speeds),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        same_answers=same,
        answers=len(plain.answers),
        drafts=subject.drafts,
    )


_COLUMNS = (
    "prompts",
    "batch",
    "drafter",
    "k",
    "tree",
    "tokens/s",
    "ratio",
    "of rounds",
    "acceptance length",
    "accepted/drafted",
    "by position",
    "steps with drafts",
    "same answers",
)


def table(report: SpeculationReport) -> Table:
    """For people."""
    how = "as many drafts as pay" if report.adapt else "always k drafts"
    title = f"{Path(report.model).name}: {how}; medians of {report.rounds} interleaved rounds"
    return plain_table(title, _COLUMNS, [_row(point) for point in report.points])


def _row(point: Point) -> tuple[str, ...]:
    drafts = point.drafts
    verified, plain = drafts["num_verified"], drafts["num_plain"]
    is_plain = point.drafter == WITHOUT
    return (
        point.group,
        str(point.batch),
        Path(point.drafter).name,  # a folder's own name says enough
        str(point.draft_tokens or ""),
        f"{point.draft_nodes} of {point.draft_top_k} each" if point.draft_top_k > 1 else "",
        f"{point.tokens_per_s:,.1f}",
        f"{point.ratio:.2f}",
        "" if is_plain else f"{point.low:.2f}-{point.high:.2f}",
        _number(drafts["acceptance_length"]),
        _number(drafts["accepted_per_drafted"]),
        " ".join(_number(share) for share in drafts["acceptance_by_place"]),
        f"{verified / (verified + plain):.0%}" if verified + plain else "",
        "" if is_plain or point.same_answers is None else f"{point.same_answers} of {point.answers}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
