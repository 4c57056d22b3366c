"""Trees of drafts change no answer, bit for bit, on the float32 reference and on our own kernels.

As `test_drafts` for chains: alone and in batches that change, chunked, cached, preempted and aborted, with
every sampling parameter, with end tokens inside accepted runs, and near the model's length.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from firstlight.engine.messages import Abort, Submit
from firstlight.engine.speculation.shape import Shape
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
    num_accepted,
)
from support.eagle3 import tiny_eagle3
from support.engines import Harness, submit
from support.knowing import KnowingTrees

TREE = Shape(5, 4, 12)
KERNELS = {"float32": {"dtype": "float32"}, "native": {"dtype": "auto", "cpu_kernels": "native"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "m", MODEL, random_weights(MODEL))


class Case:
    """Engines of one kind over a model, and what they answer without drafts."""

    def __init__(self, folder: Path, kind: str, **kv: str) -> None:
        # Places of a tree's nodes go beyond the model's length.
        self._folder, self._options = (
            folder,
            {**KERNELS[kind], **SIZES, "draft_top_k": 4, "draft_nodes": 12, **kv},
        )
        self.engine = self.other()
        self.baseline: Baseline = each_alone(self.engine)

    def other(self, **sizes: int | bool) -> Harness:
        return Harness(self._folder, **{**self._options, **sizes})  # type: ignore[arg-type]

    def knowing(self, wrong: float = 0.2) -> KnowingTrees:
        answers = {name: result.tokens for name, result in self.baseline.items()}
        return KnowingTrees(answers, VOCABULARY, wrong)


@pytest.fixture(scope="module", params=KERNELS)
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return Case(folder, request.param)


def test_each_alone(case: Case) -> None:
    results: Baseline = {}
    for item in WORKLOAD:
        case.engine.fresh(case.knowing(), TREE.depth, TREE)
        results |= case.engine.run([item])
    assert_same(results, case.baseline)
    num_tokens = sum(len(result.tokens) for result in results.values())
    assert num_accepted(results) > 0.4 * num_tokens
    ends = {result.finish_reason for result in results.values() if result.ended_in_run}
    assert ends == {"stop"}, "no end token came inside an accepted run, or a run passed a length"


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_in_a_batch(case: Case, wrong: float) -> None:
    case.engine.fresh(case.knowing(wrong), TREE.depth, TREE)
    results = case.engine.run(WORKLOAD)
    assert_same(results, case.baseline)
    assert (num_accepted(results) == 0) == (wrong == 1.0)


@pytest.mark.parametrize("seed", range(2))
def test_joining_and_leaving(case: Case, seed: int) -> None:
    chance = random.Random(seed)
    arrive: dict[int, list[Submit]] = {}
    others = [submit(f"x{n}", item.prompt_token_ids, max_tokens=60) for n, item in enumerate(WORKLOAD)]
    for item in [*WORKLOAD, *others]:
        arrive.setdefault(chance.randrange(30), []).append(item)
    engine = case.other(max_num_seqs=(3, 16)[seed], max_batched_tokens=(16, 256)[seed])
    engine.fresh(case.knowing(), TREE.depth, TREE)

    def abort(step: int) -> None:
        engine.core.handle(Abort([f"x{step - 3}"]))

    assert_same(engine.run([], arrive=arrive, before_step=abort), case.baseline)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_cached_and_on_other_pages(case: Case, page_size: int) -> None:
    """Pages that hold what trees left are read by others: with trees, with none, and with chains."""
    engine = case.other(page_size_tokens=page_size)
    engine.fresh(case.knowing(), TREE.depth, TREE)
    assert_same(engine.run(WORKLOAD), case.baseline)
    again = engine.run(WORKLOAD)
    assert sum(result.num_cached_tokens for result in again.values()) > 500
    assert_same(again, case.baseline)
    engine.draft_with(case.knowing(), 4)
    assert_same(engine.run(WORKLOAD), case.baseline)
    engine.core.speculation = None
    assert_same(engine.run(WORKLOAD), case.baseline)


@pytest.mark.parametrize("budget", [4, 33])
def test_chunked(case: Case, budget: int) -> None:
    engine = case.other(max_num_seqs=4, max_batched_tokens=budget, prefix_cache=False)
    engine.fresh(case.knowing(), TREE.depth, TREE)
    assert_same(engine.run(WORKLOAD), case.baseline)


def test_preempted(folder: Path) -> None:
    case = Case(folder, "float32")
    engine = case.other(kv_memory_bytes=17 * 16 * 2 * 16 * 2 * 2 * 4)
    engine.fresh(case.knowing(), TREE.depth, TREE)
    results = engine.run(WORKLOAD)
    assert engine.core.scheduler.stats().num_preemptions >= 5
    assert_same(results, case.baseline)
    assert num_accepted(results) > 50


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", KERNELS)
def test_with_other_types_of_keys_and_values(folder: Path, kind: str, kv_dtype: str) -> None:
    case = Case(folder, kind, kv_dtype=kv_dtype)
    case.engine.fresh(case.knowing(), TREE.depth, TREE)
    for _ in range(2):
        results = case.engine.run(WORKLOAD)
        assert_same(results, case.baseline)
    assert num_accepted(results) > 100


@pytest.mark.parametrize("sizes", [{}, {"max_batched_tokens": 16}, {"page_size_tokens": 4}], ids=str)
def test_a_drafter_over_captured_states(case: Case, tmp_path: Path, sizes: dict[str, int]) -> None:
    """A random one, in batches that change, chunked, and twice: then from the cache."""
    save_eagle3(tmp_path, tiny_eagle3(vocab_size=VOCABULARY, max_position=LENGTH, state_layers=(0, 1, 2)))
    drafting = {"drafter": str(tmp_path), "draft_tokens": 3, "draft_adapt": False}
    engine = case.other(**{**drafting, **sizes})  # type: ignore[arg-type]
    some = WORKLOAD[::3]
    expected = {item.request_id: case.baseline[item.request_id] for item in some}
    for _ in range(2):
        assert_same(engine.run(some), expected)
    assert engine.core.speculation is not None
    counts = engine.core.speculation.counts
    assert counts.num_drafted > 500
    assert len(counts.drafted) == 3
