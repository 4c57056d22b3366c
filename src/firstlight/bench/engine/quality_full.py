"""The longer half of `bench quality`: perplexity on a long text, and greedy answers to fifty questions.

Invariant: both engines see the same tokens in the same windows, and an answer ends where its own engine ends
it.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError, why_unreadable
from firstlight.bench.engine.in_process import logits_of
from firstlight.engine.params import SamplingParams
from firstlight.engine.worker.startup import Started
from firstlight.llm import LLM

LONG_TEXT_BYTES = 100_000
WINDOW = 512  # tokens that are scored together; the first of each has nothing before it
ANSWER_TOKENS = 64
_OWN_TEXT = "Give a text file in UTF-8 with --long-text."


@dataclass(frozen=True, kw_only=True)
class LongText:
    """Over all windows of one text. KL(float32 || fast) in nats a token."""

    source: str
    sha256: str
    num_bytes: int
    num_tokens: int
    kl_mean: float
    perplexity: float
    reference_perplexity: float

    @property
    def change(self) -> float:
        """Of the perplexity, as a share of the reference."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class Answer:
    """What both engines say to a question, greedily."""

    question: str
    fast: str
    exact: str


def read_long_text(path: Path | None = None) -> tuple[str, str]:
    """(text, where it is from): the start of a file, or of the reference manual that comes with Python."""
    if path is not None:
        try:
            return _cut(path.read_text(encoding="utf-8")), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {path}: {why_unreadable(error)}", _OWN_TEXT) from error
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UsageError("this Python comes without pydoc_data, its reference manual.", _OWN_TEXT) from error
    source = f"the reference manual in Python {platform.python_version()} (pydoc_data.topics)"
    return _cut("\n\n".join(topics[name] for name in sorted(topics))), source


def read_questions() -> list[str]:
    """Fifty of our own."""
    content = resources.files("firstlight.bench").joinpath("questions.txt").read_text(encoding="utf-8")
    return [line for line in content.splitlines() if line.strip()]


def measure_long_text(
    exact: Started, fast: Started, tokens: list[int], on_progress: Callable[[int, int], None]
) -> tuple[float, float, float]:
    """(mean KL, perplexity of `fast`, of `exact`) over windows of `WINDOW` tokens."""
    divergence = fast_loss = exact_loss = 0.0
    starts = range(0, len(tokens) - 1, WINDOW)
    num_scored = 0
    for number, start in enumerate(starts, 1):
        window = tokens[start : start + WINDOW]
        exact_log, fast_log = (log_probabilities(engine, window, len(window)) for engine in (exact, fast))
        divergence += float(kl_divergence(exact_log, fast_log).sum())
        exact_loss += loss_of(exact_log, window)
        fast_loss += loss_of(fast_log, window)
        num_scored += len(window) - 1
        on_progress(number, len(starts))
    return divergence / len(tokens), math.exp(fast_loss / num_scored), math.exp(exact_loss / num_scored)


def long_text_report(text: str, source: str, num_tokens: int, found: tuple[float, float, float]) -> LongText:
    """The figures with what they were measured on."""
    content = text.encode()
    return LongText(
        source=source,
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        num_tokens=num_tokens,
        kl_mean=found[0],
        perplexity=found[1],
        reference_perplexity=found[2],
    )


def answers(model: Path, questions: list[str], own: EngineSection) -> tuple[Answer, ...]:
    """Of the fast engine, threads, operators and KV as in `own`, and of float32, by the chat template."""
    plain = EngineSection(threads=own.threads)
    fast, exact = (
        _answers(model, questions, dtype, section) for dtype, section in (("auto", own), ("float32", plain))
    )
    return tuple(map(Answer, questions, fast, exact))


def log_probabilities(engine: Started, tokens: list[int], rows_per_step: int) -> torch.Tensor:
    """At every position, float64 [T, V]: a gap of 1e-4 must not drown in the rounding of the comparison."""
    return logits_of(engine, tokens, rows_per_step).double().log_softmax(-1)


def kl_divergence(exact_log_TV: torch.Tensor, other_log_TV: torch.Tensor) -> torch.Tensor:
    """KL(exact || other) of each row, in nats: [T]."""
    return (exact_log_TV.exp() * (exact_log_TV - other_log_TV)).sum(-1)


def loss_of(log_TV: torch.Tensor, tokens: list[int]) -> float:
    """Of the tokens after the first, summed, in nats."""
    following = torch.tensor(tokens[1:])
    return -float(log_TV[: len(following)].gather(1, following[:, None]).sum())


def _answers(model: Path, questions: list[str], dtype: str, section: EngineSection) -> list[str]:
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "kv_memory_bytes": 256 * 2**20}
    sizes |= {name: getattr(section, name) for name in ("threads", "cpu_kernels", "kv_dtype")}
    llm = LLM(str(model), dtype=dtype, progress=False, **sizes)
    asked = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, seed=0)
    answers = llm.chat(asked, params)
    llm.require_answers(answers)
    return [completion.text for completion in answers]


def _cut(text: str) -> str:
    return text.encode()[:LONG_TEXT_BYTES].decode(errors="ignore")
