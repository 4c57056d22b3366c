"""What may not change an answer, bit for bit, on the float32 reference: tokens, log-probabilities and logits.

Each request alone, cold and whole is the baseline; then the same requests come chunked, batched, in any
order, from the cache, preempted, restarted, beside aborted neighbours, and on other page sizes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from firstlight.engine.messages import Abort
from firstlight.facts.description import ModelDescription
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness, Result, submit
from support.workloads import requests

VOCABULARY = 1200  # more than the sampler's candidates
LENGTH = 256
MODELS: dict[str, ModelDescription] = {
    "llama": tiny_description(num_heads=6, num_kv_heads=2, vocab_size=VOCABULARY, max_position=LENGTH),
    "mistral": tiny_description("mistral", sliding_window=40, vocab_size=VOCABULARY, max_position=LENGTH),
    "some windows": tiny_description(
        "mistral",
        sliding_window=40,
        full_layers=(1,),
        vocab_size=VOCABULARY,
        max_position=LENGTH,
        eos_token_ids=tuple(range(2, 60)),
    ),
    "qwen3": tiny_description("qwen3", tie_embeddings=True, vocab_size=VOCABULARY, max_position=LENGTH),
}
WORKLOAD = requests(26, VOCABULARY)
SIZES = {"max_num_seqs": 16, "max_batched_tokens": 256}

Baseline = dict[str, Result]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = MODELS[request.param]
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "m", description, random_weights(description))


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Baseline:
    """Each request alone on an engine without a past."""
    engine = Harness(folder, **SIZES)
    results: Baseline = {}
    for item in WORKLOAD:
        engine.fresh()
        results |= engine.run([item])
    reasons = {result.finish_reason for result in results.values()}
    assert reasons == {"stop", "length"}
    assert len({tuple(result.tokens) for result in results.values()}) > 20
    return results


def assert_same(results: dict[str, Result], baseline: Baseline, skip: frozenset[str] = frozenset()) -> None:
    changed = [name for name in baseline if name not in skip and not results[name].same_bits(baseline[name])]
    assert changed == []


def kv_bytes(folder: Path, num_pages: int, page_size: int = 16) -> int:
    description = Harness(folder).started.checkpoint.description
    heads = description.num_kv_heads * description.head_size
    return num_pages * page_size * heads * description.num_layers * 2 * 4


def test_batched_equals_single(folder: Path, baseline: Baseline) -> None:
    assert_same(Harness(folder, **SIZES).run(WORKLOAD), baseline)


@pytest.mark.parametrize("budget", [4, 16, 33, 100, 1000])
def test_chunked_equals_whole(folder: Path, baseline: Baseline, budget: int) -> None:
    engine = Harness(folder, max_num_seqs=4, max_batched_tokens=budget, prefix_cache=False)
    assert_same(engine.run(WORKLOAD), baseline)


@pytest.mark.parametrize("seed", range(4))
def test_any_arrival_order(folder: Path, baseline: Baseline, seed: int) -> None:
    chance = random.Random(seed)
    order = list(WORKLOAD)
    chance.shuffle(order)
    arrive: dict[int, list] = {}
    for item in order:
        arrive.setdefault(chance.randrange(30), []).append(item)
    engine = Harness(folder, max_num_seqs=chance.choice((3, 16)), max_batched_tokens=chance.choice((32, 256)))
    assert_same(engine.run([], arrive=arrive), baseline)


def test_cached_equals_cold(folder: Path, baseline: Baseline) -> None:
    engine = Harness(folder, **SIZES)
    engine.run(WORKLOAD)
    again = engine.run(WORKLOAD)
    assert sum(result.num_cached_tokens for result in again.values()) > 1000
    assert_same(again, baseline)


def test_a_prefix_of_another_s_answer_equals_cold(folder: Path, baseline: Baseline) -> None:
    """A second turn: prompt and answer of the first come from the cache."""
    engine, fresh = Harness(folder, **SIZES), Harness(folder, prefix_cache=False, **SIZES)
    first = engine.run([submit("first", range(3, 50), max_tokens=40, ignore_eos=True)])["first"]
    prompt = [*range(3, 50), *first.tokens, 7, 8, 9]
    turn = submit("second", prompt, max_tokens=20, temperature=0.8, logprobs=2)
    cached, cold = engine.run([turn])["second"], fresh.run([turn])["second"]
    assert cached.num_cached_tokens == 80
    assert cold.num_cached_tokens == 0
    assert cached.same_bits(cold)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_equals_not_preempted(folder: Path, baseline: Baseline, prefix_cache: bool) -> None:
    """Sequences that start short and grow, so that pages run out while they run."""
    growing = [item for item in WORKLOAD if len(item.prompt_token_ids) < 40]
    long = [submit(f"g{n}", item.prompt_token_ids, max_tokens=80, temperature=0.9, seed=n, ignore_eos=True)
            for n, item in enumerate(growing)]  # fmt: skip
    roomy = Harness(folder, **SIZES).run(long)
    engine = Harness(folder, kv_memory_bytes=kv_bytes(folder, 17), prefix_cache=prefix_cache, **SIZES)
    tight = engine.run([*long, *WORKLOAD])
    assert engine.core.scheduler.stats().num_preemptions >= 5
    assert_same(tight, roomy)
    assert_same(tight, baseline)


def test_restarted_equals_fresh(folder: Path, baseline: Baseline) -> None:
    """A new scheduler over a pool full of an old run's values, and a whole new engine."""
    engine = Harness(folder, **SIZES)
    engine.run(requests(20, VOCABULARY, seed=9))
    engine.fresh()
    assert_same(engine.run(WORKLOAD), baseline)
    assert_same(Harness(folder, **SIZES).run(WORKLOAD), baseline)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes_change_nothing(folder: Path, baseline: Baseline, page_size: int) -> None:
    assert_same(Harness(folder, page_size_tokens=page_size, **SIZES).run(WORKLOAD), baseline)


def test_aborted_neighbours_change_nothing(folder: Path, baseline: Baseline) -> None:
    engine = Harness(folder, **SIZES)
    others = [submit(f"x{n}", item.prompt_token_ids, max_tokens=60) for n, item in enumerate(WORKLOAD)]
    mixed = [item for pair in zip(WORKLOAD, others, strict=True) for item in pair]

    def abort(step: int) -> None:
        if step % 2:
            engine.core.handle(Abort([f"x{step}", f"x{step + 1}", f"x{step - 1}"]))

    results = engine.run(mixed, before_step=abort)
    assert "abort" in {result.finish_reason for result in results.values()}
    assert_same(results, baseline)


def test_priorities_change_the_order_and_nothing_else(folder: Path, baseline: Baseline) -> None:
    engine = Harness(folder, max_num_seqs=2, max_batched_tokens=64)
    turned = [
        type(item)(item.request_id, item.prompt_token_ids, item.params, priority=-number)
        for number, item in enumerate(WORKLOAD)
    ]
    results = engine.run(turned)
    assert list(results)[0] == WORKLOAD[-1].request_id
    assert_same(results, baseline)


def test_logits_at_every_position_are_those_of_the_prompt_in_one_chunk(folder: Path) -> None:
    engine = Harness(folder, **SIZES)
    tokens = [3 + (7 * n) % 1000 for n in range(150)]
    rows = engine.logits_of(tokens)
    for num in (1, 16, 64, 65, 150):
        assert engine.last_logits_of(tokens[:num]).equal(rows[num - 1])


def test_seeds_make_the_difference(folder: Path) -> None:
    """The comparisons above would also hold if sampling ignored its seed."""
    engine = Harness(folder, **SIZES)
    prompt = WORKLOAD[3].prompt_token_ids
    items = [submit(str(seed), prompt, temperature=1.0, seed=seed, max_tokens=10) for seed in range(8)]
    assert len({tuple(result.tokens) for result in engine.run(items).values()}) == 8
