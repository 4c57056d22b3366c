"""Drafts change no token of 64 answers of 128 tokens by the real model (`make lossless`; some minutes).

With our own kernels. Half of the requests are greedy, half sampled with a seed; every fourth has penalties,
bias, a minimum length or log-probabilities. The baseline is each alone without drafts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.messages import Submit
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.facts.sources import resolve_model
from firstlight.text.model import TextModel
from support.engines import Harness, Result, submit
from support.knowing import Knowing
from support.prompts import PROMPTS

pytestmark = pytest.mark.timeout(3600)
SIZES = {"max_model_len": 512, "max_num_seqs": 12, "cpu_kernels": "native", "kv_memory_bytes": 2**28}
KINDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"logit_bias": {5: 3.0, 198: 2.0}, "min_tokens": 100},
    {"logprobs": 2},
    {"presence_penalty": 0.5, "stop_token_ids": (198,), "min_tokens": 20},
)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="module")
def workload(path: Path) -> list[Submit]:
    text = TextModel.load(path)
    items: list[Submit] = []
    for number, prompt in enumerate((*PROMPTS, *PROMPTS)):
        is_chat = number < len(PROMPTS)
        shown = text.render_chat([{"role": "user", "content": prompt}]) if is_chat else prompt
        params = KINDS[number // 8 % len(KINDS)] if number % 8 > 5 else {}
        asked = {"max_tokens": 128, "temperature": 0.8 * (number % 2), "seed": number, **params}
        items.append(submit(str(number), text.encode(shown), **asked))
    return items


def engine_of(path: Path, **sizes: Any) -> Harness:
    engine = Harness(path, dtype="auto", **{**SIZES, **sizes})
    engine.keeps_logits = False
    return engine


@pytest.fixture(scope="module")
def baseline(path: Path, workload: list[Submit]) -> dict[str, Result]:
    engine = engine_of(path)
    results: dict[str, Result] = {}
    for item in workload:
        engine.fresh()
        results |= engine.run([item])
    return results


def knowing(baseline: dict[str, Result]) -> Knowing:
    return Knowing({name: result.tokens for name, result in baseline.items()}, 49_152, 0.3)


def assert_same(results: dict[str, Result], baseline: dict[str, Result]) -> None:
    assert [name for name in baseline if not results[name].same_bits(baseline[name])] == []


@pytest.mark.parametrize("kind", ["ngram", "knowing"])
def test_alone(path: Path, workload: list[Submit], baseline: dict[str, Result], kind: str) -> None:
    engine = engine_of(path)
    results: dict[str, Result] = {}
    for item in workload:
        engine.fresh(NgramDrafter() if kind == "ngram" else knowing(baseline), 4)
        results |= engine.run([item])
    assert_same(results, baseline)
    assert sum(result.num_accepted for result in results.values()) > 500


@pytest.mark.parametrize("kind", ["ngram", "knowing"])
def test_joining_and_leaving_chunked_and_cached(
    path: Path, workload: list[Submit], baseline: dict[str, Result], kind: str
) -> None:
    engine = engine_of(path, max_batched_tokens=64)
    engine.fresh(NgramDrafter() if kind == "ngram" else knowing(baseline), 4)
    chance = random.Random(1)
    for _ in range(2):  # the second time from the cache
        arrive: dict[int, list[Submit]] = {}
        for item in workload:
            arrive.setdefault(chance.randrange(200), []).append(item)
        results = engine.run([], arrive=arrive)
        assert_same(results, baseline)
    assert sum(result.num_cached_tokens for result in results.values()) > 500
