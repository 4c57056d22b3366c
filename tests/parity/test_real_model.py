"""The embedded default model against transformers on its converted folder: logits, greedy tokens, rounding.

transformers is asked once for each prompt, with our answer appended: every token of ours must be the
likeliest at its place. Real logits do come close to each other, so ties within 1e-4 of the largest logit are
let through, but counted and printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.text.model import TextModel
from support.engines import Harness, Result, submit
from support.prompts import PROMPTS
from support.transformers_models import logits_of

NUM_TOKENS = 64
NUM_ROUNDED = 20  # texts on which the fast compute type is compared
RELATIVE = 1e-4
SIZES = {"max_model_len": 512, "kv_memory_bytes": 256 * 2**20}


# Two dozen seconds on a quiet machine; CI machines are not.
pytestmark = pytest.mark.timeout(600)


@dataclass
class Compared:
    """One prompt's answer beside transformers' logits for it."""

    tokens: list[int]
    difference: float  # of logits, the largest of all places, relative to the largest logit
    gaps: list[float]  # where another token was likelier: by how much, relative to the largest logit
    divergence: float | None  # KL a token of the fast compute type


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    """Beside other work, two threads on two cores wait for each other most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference(real_path: Path) -> Harness:
    return Harness(real_path, **SIZES)


@pytest.fixture(scope="module")
def prompts(real_text: TextModel) -> list[list[int]]:
    """Half of them as chats, half as bare text."""
    chats = [real_text.render_chat([{"role": "user", "content": text}]) for text in PROMPTS[::2]]
    return [real_text.encode(text) for text in (*chats, *PROMPTS[1::2])]


@pytest.fixture(scope="module")
def fast(real_path: Path) -> Harness:
    return Harness(real_path, dtype="auto", **SIZES)


@pytest.fixture(scope="module")
def compared(reference: Harness, fast: Harness, real_oracle: Any, prompts: list[list[int]]) -> list[Compared]:
    """All prompts in one batch, greedy; then transformers, once for each."""
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    results = reference.run([submit(str(n), prompt, **params) for n, prompt in enumerate(prompts)])
    answers: list[Compared] = []
    for number, prompt in enumerate(prompts):
        result = results.pop(str(number))
        tokens = prompt + result.tokens[:-1]
        theirs = logits_of(real_oracle, tokens, last=NUM_TOKENS)
        rounded = fast.logits_of(tokens)[-NUM_TOKENS:] if number < NUM_ROUNDED else None
        answers.append(compare(result, theirs, rounded))
    return answers


def compare(result: Result, theirs: torch.Tensor, rounded: torch.Tensor | None) -> Compared:
    ours = torch.stack(result.logits).view(torch.float32)
    size = theirs.abs().amax(-1)
    chosen = theirs.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    gaps = ((theirs.amax(-1) - chosen) / size).tolist()
    divergence = None
    if rounded is not None:
        true = theirs.log_softmax(-1)
        divergence = float((true.exp() * (true - rounded.log_softmax(-1))).sum(-1).mean())
    difference = float(((ours - theirs).abs().amax(-1) / size).max())
    return Compared(result.tokens, difference, [gap for gap in gaps if gap > 0.0], divergence)


def test_logits_equal_those_of_transformers(compared: list[Compared]) -> None:
    worst = max(answer.difference for answer in compared)
    print(f"largest logit difference of {32 * NUM_TOKENS} tokens: {worst:.1e} of the largest logit")
    assert worst < RELATIVE


def test_greedy_tokens_equal_those_of_transformers(compared: list[Compared]) -> None:
    assert [len(answer.tokens) for answer in compared] == [NUM_TOKENS] * 32
    gaps = [gap for answer in compared for gap in answer.gaps]
    print(f"greedy tokens: {32 * NUM_TOKENS} equal, of which {len(gaps)} by a tie within {RELATIVE}")
    assert [gap for gap in gaps if gap > RELATIVE] == []
    assert len(gaps) <= 2


def test_a_long_prompt_in_chunks_equals_one_forward_of_transformers(
    reference: Harness, real_oracle: Any, real_text: TextModel
) -> None:
    tokens = real_text.encode(" ".join(PROMPTS))[:500]
    theirs = logits_of(real_oracle, tokens)
    result = reference.run([submit("long", tokens, max_tokens=1)])["long"]
    ours = result.logits[0].view(torch.float32)
    assert float((ours - theirs[-1]).abs().max() / theirs[-1].abs().max()) < RELATIVE


def test_the_model_says_paris(reference: Harness, real_text: TextModel) -> None:
    prompt = real_text.encode(real_text.render_chat([{"role": "user", "content": PROMPTS[0]}]))
    result = reference.run([submit("a", prompt, max_tokens=30)])["a"]
    assert result.finish_reason == "stop"
    assert "The capital of France is Paris." in real_text.decode(result.tokens)


def test_the_fast_compute_type_stays_close(fast: Harness, compared: list[Compared]) -> None:
    """KL a token of the fast layouts against float32, on real texts."""
    divergences = [answer.divergence for answer in compared if answer.divergence is not None]
    mean = sum(divergences) / len(divergences)
    print(f"KL a token of the fast compute type, {len(divergences)} texts: {mean:.1e}")
    print(*fast.started.report["layouts"], sep="\n")
    assert len(divergences) == NUM_ROUNDED
    assert mean < 2e-3
