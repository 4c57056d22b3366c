"""`firstlight bench speculation`: the same answers with each drafter and without, side by side.

Called by the cli. Each subject is an engine of its own in this process, and all take their turns in every
round, so that a noisy machine is noisy for all. An answer ends where it would begin to repeat itself: loops
are easy to guess. Invariant: a speed stands beside the acceptance and the k it came with, and beside whether
the answers were the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError
from firstlight.bench.in_process import open_engine
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table
from firstlight.drafter import families
from firstlight.drafter.loops import loop_start
from firstlight.drafter.prompt_files import read_prompt_file
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.counts import DraftCounts, figures
from firstlight.engine.step_times import measure_step_times
from firstlight.text.model import TextModel

WITHOUT = "none"
MAX_PROMPT_TOKENS = 512
SHORTEST_ANSWER = 8  # what is left of an answer without its loop must be worth timing


@dataclass(frozen=True, kw_only=True)
class SpeculationOrder:
    """What to compare: `drafters` with each of `draft_tokens`, on `prompts_each` prompts of each group."""

    model: Path
    drafters: tuple[str, ...]
    draft_tokens: tuple[int, ...] = (3,)
    adapt: bool = True
    files: tuple[Path, ...] = ()
    prompts_each: int = 8
    answer_tokens: int = 128
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    rounds: int = 7
    threads: int = 0
    cpu_kernels: str = "auto"

    def section(self, drafter: str, draft_tokens: int) -> EngineSection:
        """An engine of this comparison."""
        return EngineSection(
            threads=self.threads,
            cpu_kernels=self.cpu_kernels,
            max_model_len=MAX_PROMPT_TOKENS + self.answer_tokens + 16,
            max_num_seqs=max(self.batches),
            prefix_cache=False,
            drafter=None if drafter == WITHOUT else drafter,
            draft_tokens=draft_tokens,
            draft_adapt=self.adapt,
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One subject on one group of prompts at one batch size. `ratio`: the median over rounds of its speed by
    that without a drafter in the same round.
    """

    group: str
    batch: int
    drafter: str
    draft_tokens: int
    tokens_per_s: float
    ratio: float
    low: float
    high: float
    same_answers: int
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


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    num_answer: int


@dataclass
class _Subject:
    """One engine, and what it has done so far in one group at one batch size."""

    drafter: str
    draft_tokens: int
    core: EngineCore
    times_s: Mapping[int, float]
    report: dict[str, Any]
    speeds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.drafter if self.drafter == WITHOUT else f"{self.drafter} k={self.draft_tokens}"

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts() if self.core.speculation is None else self.core.speculation.counts

    def forget(self) -> None:
        """A new group or batch size begins; what the engine has learnt of acceptance is forgotten, too."""
        self.speeds, self.answers = [], []
        self.core.begin(self.times_s)

    def answer(self, prompts: Sequence[_Prompt], *, ignore_eos: bool = True) -> float:
        """Tokens a second while all decode: from when every prompt has its first token."""
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0.0, max_tokens=prompt.num_answer, ignore_eos=ignore_eos, seed=0
            )
            self.core.handle(Submit(str(number), prompt.tokens, params))
        answers: list[list[int]] = [[] for _ in prompts]
        started_s: float | None = None
        timed = 0
        while self.core.has_work:
            outputs = self.core.step()
            for output in outputs.outputs if outputs is not None else []:
                answers[int(output.request_id)] += output.token_ids
                timed += len(output.token_ids) if started_s is not None else 0
            if started_s is None and all(answers):
                started_s = perf_counter()
        assert started_s is not None, "a request was given no token"
        self.answers += answers
        return timed / (perf_counter() - started_s)


def bench_speculation(order: SpeculationOrder, on_progress: Callable[[int, int], None]) -> SpeculationReport:
    """Runs the comparison; takes minutes. Raises `UsageError`s before anything is loaded, where it can."""
    if not order.drafters:
        raise UsageError("no drafter is given.", "Give --drafter ngram, or the folder of a drafter.")
    groups = _groups(order)
    subjects = _open(order)
    texts = TextModel.load(order.model)
    points: list[Point] = []
    total = len(groups) * len(order.batches) * order.rounds
    done = 0
    for group, messages in groups.items():
        prompts = _measured_prompts(order, texts, messages, subjects[0])
        for batch in order.batches:
            for subject in subjects:
                subject.forget()
            for number in range(order.rounds):
                _round(subjects, prompts, batch, number)
                done += 1
                on_progress(done, total)
            points += [_point(group, batch, subject, subjects[0]) for subject in subjects]
    times_s = {subject.name: dict(subject.times_s) for subject in subjects}
    return SpeculationReport(
        str(order.model), order.rounds, order.adapt, subjects[0].report, times_s, tuple(points)
    )


def _round(subjects: Sequence[_Subject], prompts: Sequence[_Prompt], batch: int, number: int) -> None:
    """Every subject once, each round beginning with another one."""
    first = number % len(subjects)
    for subject in [*subjects[first:], *subjects[:first]]:
        chosen = [prompts[place % len(prompts)] for place in range(max(batch, len(prompts)))]
        speeds = [subject.answer(chosen[at : at + batch]) for at in range(0, len(chosen), batch)]
        subject.speeds.append(len(speeds) / sum(1.0 / speed for speed in speeds))


def _groups(order: SpeculationOrder) -> dict[str, list[list[dict[str, Any]]]]:
    """Conversations by group: the families that no drafter of ours was trained on, and the files given."""
    if order.files:
        return {path.stem: list(read_prompt_file(path))[: order.prompts_each] for path in order.files}
    rng = random.Random(20)
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for name in families.HELD_OUT:
        texts = {families.TEMPLATES[name](rng): None for _ in range(20 * order.prompts_each)}
        groups[name] = [[{"role": "user", "content": text}] for text in list(texts)[: order.prompts_each]]
    return groups


def _open(order: SpeculationOrder) -> list[_Subject]:
    wanted = [(WITHOUT, order.draft_tokens[0])]
    wanted += [(drafter, num) for drafter in order.drafters for num in order.draft_tokens]
    subjects = []
    for drafter, num in wanted:
        started = open_engine(order.model, "auto", order.section(drafter, num))
        core = started.core(started.runner.run)
        times_s = measure_step_times(core, started.checkpoint.description.vocab_size)
        subjects.append(_Subject(drafter, num, core, times_s, started.report))
    return subjects


def _measured_prompts(
    order: SpeculationOrder, text: TextModel, conversations: Sequence[Sequence[Any]], plain: _Subject
) -> list[_Prompt]:
    """The prompts, and how long each answer is before it ends or begins to repeat itself."""
    encoded = [text.encode(text.render_chat(m), add_special_tokens=False) for m in conversations]
    fitting = [tokens for tokens in encoded if len(tokens) <= MAX_PROMPT_TOKENS]
    plain.forget()
    for tokens in fitting:
        plain.answer([_Prompt(tokens, order.answer_tokens)], ignore_eos=False)
    prompts = []
    for tokens, answer in zip(fitting, plain.answers, strict=True):
        loop = loop_start(answer)
        num_answer = len(answer) if loop is None else loop
        if num_answer >= SHORTEST_ANSWER:
            prompts.append(_Prompt(tokens, num_answer))
    if not prompts:
        raise UsageError("no prompt has an answer that could be timed.", "Give other prompts.")
    return prompts


def _point(group: str, batch: int, subject: _Subject, plain: _Subject) -> Point:
    ratios = [mine / its for mine, its in zip(subject.speeds, plain.speeds, strict=True)]
    same = sum(mine == its for mine, its in zip(subject.answers, plain.answers, strict=True))
    return Point(
        group=group,
        batch=batch,
        drafter=subject.drafter,
        draft_tokens=subject.draft_tokens,
        tokens_per_s=median(subject.speeds),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        same_answers=same,
        answers=len(plain.answers),
        drafts=figures(subject.counts),
    )


def table(report: SpeculationReport) -> Table:
    """For people."""
    columns = ("prompts", "batch", "drafter", "k", "tokens/s", "ratio", "of rounds", "acceptance length")
    columns += ("accepted/drafted", "by position", "steps with drafts", "same answers")
    how = "as many drafts as pay" if report.adapt else "always k drafts"
    title = f"{report.model}: {how}; medians of {report.rounds} interleaved rounds"
    return plain_table(title, columns, [_row(point) for point in report.points])


def _row(point: Point) -> tuple[str, ...]:
    drafts = point.drafts
    verified, plain = drafts["num_verified"], drafts["num_plain"]
    has_drafts = point.drafter != WITHOUT
    return (
        point.group,
        str(point.batch),
        point.drafter,
        str(point.draft_tokens) if has_drafts else "",
        f"{point.tokens_per_s:,.1f}",
        f"{point.ratio:.2f}",
        f"{point.low:.2f}-{point.high:.2f}" if has_drafts else "",
        _number(drafts["acceptance_length"]),
        _number(drafts["accepted_per_drafted"]),
        " ".join(_number(share) for share in drafts["acceptance_by_place"]),
        f"{verified / (verified + plain):.0%}" if verified + plain else "",
        f"{point.same_answers} of {point.answers}" if has_drafts else "",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
