"""Models with experts and latent attention: what may not change an answer, bit for bit.

As `test_invariants`, on the float32 reference and on our own kernels, and with drafts: a row's experts and
its latents must not depend on the batch that it comes in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.engine.speculation.shape import Shape
from support.engines import Harness, Result, submit
from support.experts import description_of, kimi, write_experts
from support.knowing import Knowing, KnowingTrees
from support.workloads import circling, requests

VOCABULARY = 300
LENGTH = 192
MODELS = {
    "kimi_k2": kimi(vocab_size=VOCABULARY, max_position=LENGTH),
    "qwen3_moe": description_of("qwen3_moe", vocab_size=VOCABULARY, max_position=LENGTH),
    "minimax_m2": description_of("minimax_m2", vocab_size=VOCABULARY, max_position=LENGTH),
}
OPERATORS = {
    "reference": {"dtype": "float32"},
    "native": {"dtype": "auto", "cpu_kernels": "native", "threads": 2},
    "native, int8": {"dtype": "auto", "cpu_kernels": "native", "threads": 1, "kv_dtype": "int8"},
}
CASES = [("kimi_k2", "reference"), ("kimi_k2", "native"), ("kimi_k2", "native, int8"),
         ("qwen3_moe", "native"), ("minimax_m2", "reference")]  # fmt: skip
WORKLOAD = [*requests(8, VOCABULARY), *circling(2, max_tokens=40)]
TREE = Shape(5, 4, 12)
# Places of a tree's nodes go beyond the model's length.
SIZES = {
    "max_num_seqs": 16,
    "max_batched_tokens": 256,
    "max_model_len": LENGTH,
    "draft_top_k": 4,
    "draft_nodes": 12,
}
Baseline = dict[str, Result]
Case = tuple[Path, dict]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, operators = request.param
    folder = write_experts(tmp_path_factory.mktemp("tiny") / "m", MODELS[model])
    return folder, OPERATORS[operators]


@pytest.fixture(scope="module")
def engine(case: Case) -> Harness:
    return Harness(case[0], **case[1], **SIZES)


@pytest.fixture(scope="module")
def baseline(engine: Harness) -> Baseline:
    """Each request alone on an engine without a past."""
    results: Baseline = {}
    for item in WORKLOAD:
        engine.fresh()
        results |= engine.run([item])
    assert len({tuple(result.tokens) for result in results.values()}) > 7
    return results


def assert_same(results: dict[str, Result], baseline: Baseline) -> None:
    assert [name for name in baseline if not results[name].same_bits(baseline[name])] == []


def test_batched_equals_single_and_cached_equals_cold(engine: Harness, baseline: Baseline) -> None:
    engine.fresh()
    assert_same(engine.run(WORKLOAD), baseline)
    again = engine.run(WORKLOAD)
    assert sum(result.num_cached_tokens for result in again.values()) > 100
    assert_same(again, baseline)


@pytest.mark.parametrize("budget", [5, 48])
def test_chunked_equals_whole(case: Case, baseline: Baseline, budget: int) -> None:
    sizes = {**SIZES, "max_num_seqs": 4, "max_batched_tokens": budget, "page_size_tokens": 4}
    assert_same(Harness(case[0], **case[1], **sizes, prefix_cache=False).run(WORKLOAD), baseline)


def test_preempted_equals_not_preempted(case: Case, engine: Harness, baseline: Baseline) -> None:
    growing = [submit(f"g{n}", range(3, 20 + n), max_tokens=60, temperature=0.9, seed=n, ignore_eos=True)
               for n in range(6)]  # fmt: skip
    engine.fresh()
    roomy = engine.run(growing)
    page_bytes = engine.started.runner._pool.token_bytes * 16
    tight = Harness(case[0], **case[1], **{**SIZES, "kv_memory_bytes": 13 * page_bytes})
    results = tight.run([*growing, *WORKLOAD])
    assert tight.core.scheduler.stats().num_preemptions >= 2
    assert_same(results, roomy)
    assert_same(results, baseline)


@pytest.mark.parametrize("num", [1, 4])
def test_drafts_change_no_bit(engine: Harness, baseline: Baseline, num: int) -> None:
    """Right and wrong ones of a drafter that knows the answers, and those of prompt lookup."""
    answers = {name: result.tokens for name, result in baseline.items()}
    for drafter in (Knowing(answers, VOCABULARY, 0.3), NgramDrafter()):
        engine.fresh(drafter, num)
        results = engine.run(WORKLOAD)
        assert_same(results, baseline)
        assert sum(result.num_accepted for result in results.values()) > 10


def test_trees_of_drafts_change_no_bit(engine: Harness, baseline: Baseline) -> None:
    answers = {name: result.tokens for name, result in baseline.items()}
    engine.fresh(KnowingTrees(answers, VOCABULARY, 0.3), TREE.depth, TREE)
    results = engine.run(WORKLOAD)
    assert_same(results, baseline)
    assert sum(result.num_accepted for result in results.values()) > 10


def test_the_pool_holds_a_latent_and_a_rotary_key_a_token(engine: Harness) -> None:
    """Not a key and a value for each head."""
    description = engine.started.checkpoint.description
    pool = engine.started.runner._pool
    if description.latent is None:
        assert pool.keys[0].data_ptr() != pool.values[0].data_ptr()
        return
    size = description.latent.latent_size + description.latent.rope_size
    tail = 8 if pool.keys[0].element_size() == 1 else 0
    assert pool.token_bytes == description.num_layers * (size + tail) * pool.keys[0].element_size()
    assert all(keys is values for keys, values in zip(pool.keys, pool.values, strict=True))
