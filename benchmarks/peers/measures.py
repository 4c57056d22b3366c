"""What is measured of every engine, and how a figure follows from a load's report. Pure.

Used by `rounds`, `goals` and `page`. Invariant: the same measure has the same prompts for every engine in a
round, and other ones in every other round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.base.errors import EngineError
from firstlight.bench.serving.prompts import SyntheticPrompts
from firstlight.bench.serving.serving_report import ServingReport

# What is asked, and what an answer must contain.
# The model in float32 answers all of them rightly; others, as the capital of Italy, it does not.
QUESTIONS = (
    ("What is the capital of France?", "paris"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the opposite of hot?", "cold"),
    ("What language is spoken in Spain?", "spanish"),
    ("What is 2+2?", "4"),
    ("How many days are in a week?", "7"),
    ("What color is the sky?", "blue"),
    ("What is the chemical symbol for water?", "h2o"),
)
MOST_WRONG = 1
ANSWER_TOKENS = 24
KV_TOKENS, MAX_SEQUENCES, MAX_MODEL_LEN = 8192, 32, 1024  # of every engine
LAUNCH, MEMORY = "launch", "memory"
_REPORT_BUG = "Look at the server's own output; the other engines go on."


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A load, and which figure of it counts.

    `kind` is "decode", "crowd", "prefill", "first", "launch" or "memory".
    """

    name: str
    label: str
    unit: str
    kind: str
    num_requests: int = 0
    concurrency: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 128
    is_more_better: bool = True

    @property
    def is_load(self) -> bool:
        return self.num_requests > 0

    @property
    def prompts(self) -> SyntheticPrompts:
        return SyntheticPrompts(num_tokens=self.prompt_tokens)

    def seed(self, round_number: int) -> int:
        """Of the prompts."""
        return 100 * round_number + MEASURES.index(self)

    def is_better(self, one: float, other: float) -> bool:
        """Whether `one` is the better figure."""
        return one > other if self.is_more_better else one < other

    def times_better(self, ours: float, theirs: float) -> float:
        """How many times better ours is, whichever direction is good."""
        return ours / theirs if self.is_more_better else theirs / ours


MEASURES = (
    Measure(name=LAUNCH, label="launch to first token", unit="s", kind="launch", is_more_better=False),
    Measure(
        name="first_64",
        label="time to first token, 64 tokens",
        unit="ms",
        kind="first",
        num_requests=5,
        new_tokens=1,
        is_more_better=False,
    ),
    Measure(
        name="prefill_512",
        label="prefill of 512",
        unit="tok/s",
        kind="prefill",
        num_requests=3,
        prompt_tokens=512,
        new_tokens=1,
    ),
    Measure(name="decode_1", label="decode, batch 1", unit="tok/s", kind="decode", num_requests=2),
    Measure(name="crowd_8", label="concurrency 8", unit="tok/s", kind="crowd", num_requests=8, concurrency=8),
    Measure(
        name="crowd_32", label="concurrency 32", unit="tok/s", kind="crowd", num_requests=32, concurrency=32
    ),
    Measure(name=MEMORY, label="memory (PSS)", unit="MB", kind="memory", is_more_better=False),
)
BY_NAME = {measure.name: measure for measure in MEASURES}
# Before the first load of a visit: every thread and buffer has been used once.
WARM_UP = Measure(
    name="warm_up", label="warm-up", unit="", kind="crowd", num_requests=8, concurrency=8, new_tokens=8
)


def figure(measure: Measure, report: ServingReport) -> float:
    """The figure of a load, in the measure's unit. Raises `EngineError` where it was not carried out."""
    if report.num_errors:
        raise EngineError(f"{measure.name}: requests failed: {report.errors}", _REPORT_BUG)
    wanted = measure.num_requests * measure.new_tokens
    if report.output_tokens != wanted:
        raise EngineError(f"{measure.name}: {report.output_tokens} tokens came, not {wanted}", _REPORT_BUG)
    assert report.ttft_s is not None
    if measure.kind == "crowd":
        return report.output_tokens_per_s
    if measure.kind == "decode":
        assert report.tpot_s is not None
        return 1 / report.tpot_s.percentiles[50]
    first_s = report.ttft_s.percentiles[50]
    return measure.prompt_tokens / first_s if measure.kind == "prefill" else first_s * 1e3


def num_right(answers: Sequence[str]) -> int:
    """Of an engine's answers to `QUESTIONS`."""
    pairs = zip(QUESTIONS, answers, strict=False)
    return sum(expected in answer.lower() for (_, expected), answer in pairs)


def are_right(answers: Sequence[str]) -> bool:
    """Whether the engine may count: one answer may hang on a near tie, and be another than float32's."""
    return num_right(answers) >= len(QUESTIONS) - MOST_WRONG
