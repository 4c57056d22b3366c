"""Recorded steps of our own CPU kernels: bit for bit what the operators give one by one, on every model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.reader import Place, read_box
from firstlight.base.blackbox.recorder import NoBox
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.engine.worker.replay import EagerReplay, RecordedReplay
from firstlight.facts.description import ModelDescription
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness, submit
from support.experts import description_of, write_experts

MODELS: dict[str, ModelDescription] = {
    "llama": tiny_description(num_heads=6, num_kv_heads=2),
    "tied": tiny_description("qwen3", tie_embeddings=True),  # with norms of q and k
    "biases": tiny_description("qwen2"),
    "window": tiny_description("mistral", sliding_window=20),
    "window in a layer": tiny_description("mistral", sliding_window=20, full_layers=(0,)),
    "experts": description_of("qwen3_moe"),
    "latents": description_of("kimi_k2"),
    "a part of each head turns": description_of("minimax_m2"),
}
CALLED = ("minimax_m2",)  # its attention is no operator of a program
TOKENS = [3 + (7 * n) % 40 for n in range(50)]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    description, target = MODELS[request.param], tmp_path_factory.mktemp("tiny") / "m"
    if description.experts is not None:
        return write_experts(target, description)
    return write_hf_folder(target, description, random_weights(description))


@pytest.fixture(params=["auto", "bfloat16", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(folder: Path, kv_dtype: str) -> Harness:
    sizes = {"max_batched_tokens": 32, "max_num_seqs": 8, "threads": 2}
    engine = Harness(folder, dtype="auto", cpu_kernels="auto", kv_dtype=kv_dtype, **sizes)
    assert engine.started.report["backend"].startswith("cpu-native"), engine.started.report["backend"]
    return engine


def test_recorded_equals_eager(harness: Harness) -> None:
    runner = harness.started.runner
    recorded = runner._replay
    assert isinstance(recorded, RecordedReplay)
    runs = [harness.logits_of(TOKENS), harness.last_logits_of(TOKENS), harness.last_logits_of(TOKENS[:1])]
    runner._replay = EagerReplay(recorded._model)
    eager = [harness.logits_of(TOKENS), harness.last_logits_of(TOKENS), harness.last_logits_of(TOKENS[:1])]
    assert all(torch.equal(one, other) for one, other in zip(runs, eager, strict=True))


def test_recorded_is_close_to_the_reference(harness: Harness, folder: Path, kv_dtype: str) -> None:
    reference = Harness(folder, kv_dtype=kv_dtype).logits_of(TOKENS)
    torch.testing.assert_close(harness.logits_of(TOKENS), reference, rtol=2e-2, atol=2e-2)


def test_rows_do_not_know_each_other(harness: Harness) -> None:
    rows = harness.logits_of(TOKENS)
    for num in (1, 2, 16, 33, 50):
        assert harness.last_logits_of(TOKENS[:num]).equal(rows[num - 1])


def test_batched_equals_single(harness: Harness) -> None:
    prompts = [TOKENS[:n] for n in (1, 5, 17, 30, 31, 40)]
    items = [
        submit(str(n), prompt, max_tokens=12, temperature=0.9, seed=n) for n, prompt in enumerate(prompts)
    ]
    together = harness.run(items)
    for item in items:
        harness.fresh()
        assert harness.run([item])[item.request_id].same_bits(together[item.request_id])


def test_the_black_box_is_written_by_the_step(tmp_path: Path, harness: Harness) -> None:
    create_box(tmp_path / "box", role="rank", rank=0, run_id="run")
    box = BlackBox(tmp_path / "box")
    runner = harness.started.runner
    replay = runner._replay
    assert isinstance(replay, RecordedReplay)
    replay.watched_by(box)
    harness.last_logits_of(TOKENS)
    now = read_box(tmp_path / "box")
    assert (now.step, now.operator) == (1, Place("", 0))
    assert replay._tape is not None
    places = []
    for op in replay.operators:  # what the library stores when it comes to them
        box.set(Counter.OPERATOR, op.label)
        places.append(read_box(tmp_path / "box", with_events=False).operator)
    assert Place("norm", 1) in places[:2]
    assert Place("norm", 2) in places
    if harness.started.checkpoint.description.architecture in CALLED:
        return
    assert [Place("norm", 1), Place("product of normed", 1)] in [places[:2], places[1:3]]
    assert Place("attention", 2) in places
    assert places[-1] == Place("product of normed", 0)
    replay.watched_by(NoBox())
