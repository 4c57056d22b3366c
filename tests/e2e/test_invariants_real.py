"""The equality invariants on the real model, bit for bit, on the float32 reference and on our own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.engine.messages import Submit
from firstlight.engine.speculation.drafter import Drafter
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.engine.speculation.shape import Shape
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.sources import resolve_model
from firstlight.models.eagle3_file import save_eagle3
from firstlight.ops.cpu.pick import pick_cpu_kernels
from firstlight.text.model import TextModel
from support.eagle3 import tiny_eagle3
from support.engines import Harness, Result, submit
from support.knowing import KnowingTrees
from support.prompts import PROMPTS

pytestmark = pytest.mark.timeout(600)  # a dozen seconds on a quiet machine
PAGE_ROWS = 30 * 2 * 3 * 16  # layers, keys and values, heads, tokens
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "max_batched_tokens": 96, "cpu_kernels": "auto"}
Kind = tuple[str, str, int]  # dtype, type of KV, and bytes of 64 values of it
KINDS: list[Kind] = [
    ("float32", "auto", 64 * 4),
    ("auto", "auto", 64 * 2),
    ("auto", "bfloat16", 64 * 2),
    ("auto", "int8", 64 + 8),
]


@pytest.fixture(scope="module")
def path() -> Path:
    torch.set_num_threads(1)
    return resolve_model(None)


@pytest.fixture(scope="module", params=KINDS, ids=["float32", "auto", "bfloat16", "int8"])
def kind(request: pytest.FixtureRequest, path: Path) -> Kind:
    if request.param[0] == "auto":
        pick = pick_cpu_kernels("auto", 1)
        assert pick.row_invariant, f"stock operators promise no equal bits: {pick.reason}"
    return request.param


def engine_of(path: Path, kind: Kind, num_pages: int, **sizes: Any) -> Harness:
    dtype, kv_dtype, row_bytes = kind
    kv = {"kv_memory_bytes": num_pages * PAGE_ROWS * row_bytes, "kv_dtype": kv_dtype}
    return Harness(path, dtype=dtype, **{**SIZES, **kv, **sizes})


@pytest.fixture(scope="module")
def engine(path: Path, kind: Kind) -> Harness:
    """One for all tests of a kind, which begin with `fresh`: a start takes longer than a run."""
    return engine_of(path, kind, 64)


@pytest.fixture(scope="module")
def workload(path: Path) -> list[Submit]:
    """Chats, bare text, and a prompt of more than a step; greedy and sampled."""
    text = TextModel.load(path)
    chat = text.encode(text.render_chat([{"role": "user", "content": PROMPTS[0]}]))
    other = text.encode(text.render_chat([{"role": "user", "content": PROMPTS[3]}]))
    long = text.encode(" ".join(PROMPTS))[:112]
    params = {"max_tokens": 10, "logprobs": 2, "ignore_eos": True}
    return [
        submit("chat", chat, **params),
        submit("other", other, **params, temperature=1.0, seed=5),
        submit("code", text.encode(PROMPTS[5]), **params, temperature=0.7, top_p=0.9, seed=6),
        submit("long", long, **params, temperature=1.0, min_p=0.05, seed=7),
    ]


@pytest.fixture(scope="module")
def baseline(engine: Harness, workload: list[Submit]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for item in workload:
        engine.fresh()
        results |= engine.run([item])
    return results


def assert_same(results: dict[str, Result], baseline: dict[str, Result]) -> None:
    assert [name for name in baseline if not results[name].same_bits(baseline[name])] == []


def test_batched_then_cached_then_restarted(
    engine: Harness, workload: list[Submit], baseline: dict[str, Result]
) -> None:
    engine.fresh()
    assert_same(engine.run(workload), baseline)
    again = engine.run(reversed(workload))
    assert again["long"].num_cached_tokens == 96
    assert_same(again, baseline)
    engine.fresh()
    assert_same(engine.run(workload[::-1]), baseline)


def test_chunked_and_arriving_one_by_one(
    engine: Harness, workload: list[Submit], baseline: dict[str, Result]
) -> None:
    engine.fresh(max_batched_tokens=33, prefix_cache=False)
    arrive = {3 * number: [item] for number, item in enumerate(workload)}
    assert_same(engine.run([], arrive=arrive), baseline)


def test_preempted(engine: Harness, workload: list[Submit], baseline: dict[str, Result]) -> None:
    engine.fresh(num_pages=12, max_model_len=11 * 16)
    params = {"max_tokens": 24, "ignore_eos": True}
    neighbours = [submit(f"n{n}", workload[0].prompt_token_ids, **params, seed=n) for n in range(4)]
    results = engine.run([*workload, *neighbours])
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert_same(results, baseline)


@pytest.mark.parametrize("drafts", ["prompt lookup", "chains that are often right", "trees"])
def test_with_drafts(
    engine: Harness, workload: list[Submit], baseline: dict[str, Result], drafts: str
) -> None:
    knowing = KnowingTrees({name: result.tokens for name, result in baseline.items()}, 49_152, 0.2)
    drafter: Drafter = NgramDrafter() if drafts == "prompt lookup" else knowing
    engine.fresh(drafter, 4, Shape(4, 3, 12) if drafts == "trees" else None)
    results = engine.run(workload)
    assert_same(results, baseline)
    assert drafter is not knowing or sum(result.num_accepted for result in results.values()) >= 10


def test_with_a_drafter_over_captured_states(
    path: Path, kind: Kind, workload: list[Submit], baseline: dict[str, Result], tmp_path: Path
) -> None:
    """A random one: its keys have the type of the target's, and what it guesses is wrong as a rule."""
    target = open_checkpoint(path).description
    sizes = {"hidden_size": 576, "target_hidden_size": 576, "head_size": 64, "state_layers": (2, 15, 27)}
    drafter = tiny_eagle3(**sizes, vocab_size=target.vocab_size, draft_vocab_size=512)
    save_eagle3(tmp_path, drafter)
    engine = engine_of(path, kind, 70, drafter=str(tmp_path), draft_tokens=3, draft_adapt=False)
    for _ in range(2):  # the second time from the cache
        assert_same(engine.run(workload), baseline)
    assert engine.core.speculation is not None
    assert sum(engine.core.speculation.counts.drafted) > 50
