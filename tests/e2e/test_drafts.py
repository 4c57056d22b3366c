"""Drafts change no answer, bit for bit, on the float32 reference: tokens, log-probabilities and logits.

The baseline is each request alone without drafts. Then come drafts of every quality and number, alone and in
batches that change, chunked, cached, preempted and aborted. A drafter that knows the answers makes sure that
drafts are accepted; its errors, that they are rejected.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from firstlight.engine.messages import Abort, Submit
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.models.eagle3_file import save_eagle3
from support.checkpoints import random_weights, write_hf_folder
from support.draft_workload import (
    LENGTH,
    MODEL,
    SIZES,
    VOCABULARY,
    WORKLOAD,
    Baseline,
    assert_same,
    each_alone,
    knowing,
    num_accepted,
)
from support.eagle3 import tiny_eagle3
from support.engines import Harness, submit
from support.workloads import circling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "m", MODEL, random_weights(MODEL))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Harness:
    return Harness(folder, **SIZES)


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Baseline:
    return each_alone(Harness(folder, **SIZES))


@pytest.mark.parametrize("num", [1, 3, 8])
def test_each_alone(engine: Harness, baseline: Baseline, num: int) -> None:
    results: Baseline = {}
    for item in WORKLOAD:
        engine.fresh(knowing(baseline), num)
        results |= engine.run([item])
    assert_same(results, baseline)
    num_tokens = sum(len(result.tokens) for result in results.values())
    assert num_accepted(results) > 0.25 * num_tokens
    ends = {result.finish_reason for result in results.values() if result.ended_in_run}
    assert ends == {"stop"}, "no end token came inside an accepted run, or a run passed a length"


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_in_a_batch(engine: Harness, baseline: Baseline, wrong: float) -> None:
    engine.fresh(knowing(baseline, wrong), 4)
    results = engine.run(WORKLOAD)
    assert_same(results, baseline)
    assert (num_accepted(results) == 0) == (wrong == 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_joining_and_leaving(folder: Path, baseline: Baseline, seed: int) -> None:
    """Any order of arrival, aborted neighbours, and a step too small for all the drafts."""
    chance = random.Random(seed)
    arrive: dict[int, list[Submit]] = {}
    others = [submit(f"x{n}", item.prompt_token_ids, max_tokens=60) for n, item in enumerate(WORKLOAD)]
    for item in [*WORKLOAD, *others]:
        arrive.setdefault(chance.randrange(30), []).append(item)
    engine = Harness(folder, max_num_seqs=chance.choice((3, 16)), max_batched_tokens=chance.choice((16, 256)))
    engine.fresh(knowing(baseline), 5)

    def abort(step: int) -> None:
        engine.core.handle(Abort([f"x{step - 3}"]))

    assert_same(engine.run([], arrive=arrive, before_step=abort), baseline)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_cached_and_on_other_pages(folder: Path, baseline: Baseline, page_size: int) -> None:
    """The cache is filled by a run with drafts, and read by one with drafts and one without."""
    engine = Harness(folder, page_size_tokens=page_size, **SIZES)
    engine.fresh(knowing(baseline), 4)
    assert_same(engine.run(WORKLOAD), baseline)
    again = engine.run(WORKLOAD)
    assert sum(result.num_cached_tokens for result in again.values()) > 500
    assert_same(again, baseline)
    engine.core.speculation = None
    assert_same(engine.run(WORKLOAD), baseline)


@pytest.mark.parametrize("budget", [4, 33])
def test_chunked(folder: Path, baseline: Baseline, budget: int) -> None:
    engine = Harness(folder, max_num_seqs=4, max_batched_tokens=budget, prefix_cache=False)
    engine.fresh(knowing(baseline), 4)
    assert_same(engine.run(WORKLOAD), baseline)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted(folder: Path, baseline: Baseline, prefix_cache: bool) -> None:
    """Pages run out while sequences grow; drafts themselves push nobody out."""
    pages_bytes = 17 * 16 * 2 * 16 * 2 * 2 * 4
    engine = Harness(folder, kv_memory_bytes=pages_bytes, prefix_cache=prefix_cache, **SIZES)
    engine.fresh(knowing(baseline), 4)
    results = engine.run(WORKLOAD)
    assert engine.core.scheduler.stats().num_preemptions >= 5
    assert_same(results, baseline)
    assert num_accepted(results) > 50


def test_prompt_lookup(engine: Harness, baseline: Baseline) -> None:
    engine.fresh()
    circles = circling(8)
    plain = engine.run(circles)
    engine.fresh(NgramDrafter(), 4)
    results = engine.run([*WORKLOAD, *circles])
    assert_same(results, baseline | plain)
    assert num_accepted(results) > 200
    assert engine.core.speculation is not None
    counts = engine.core.speculation.counts
    assert sum(counts.accepted) == num_accepted(results)


@pytest.mark.parametrize("sizes", [{}, {"max_batched_tokens": 16}, {"page_size_tokens": 4}], ids=str)
def test_a_drafter_over_captured_states(
    folder: Path, baseline: Baseline, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """A random one, in batches that change, chunked, and twice: then from the cache."""
    save_eagle3(tmp_path, tiny_eagle3(vocab_size=VOCABULARY, max_position=LENGTH, state_layers=(0, 1, 2)))
    drafting = {"drafter": str(tmp_path), "draft_tokens": 3, "draft_adapt": False}
    engine = Harness(folder, **{**SIZES, **drafting, **sizes})
    some = WORKLOAD[::3]
    expected = {item.request_id: baseline[item.request_id] for item in some}
    for _ in range(2):
        assert_same(engine.run(some), expected)
    assert engine.core.speculation is not None
    assert sum(engine.core.speculation.counts.drafted) > 500
