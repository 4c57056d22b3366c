"""On a CUDA device: the same engine gives the reference's logits, and graphs give the eager tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.engine.worker.replay import EagerReplay
from firstlight.ops.cuda.step_clock import EventClock
from firstlight.ops.step_clock import Kind
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness, submit

pytestmark = pytest.mark.gpu
PROMPTS = {f"r{i}": [(7 * i + 3 * j) % 60 + 1 for j in range(5 + 9 * i)] for i in range(5)}


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description(request.param)
    return write_hf_folder(tmp_path_factory.mktemp("model"), description, random_weights(description))


def test_float32_logits_equal_the_reference(model: Path) -> None:
    reference, cuda = Harness(model), Harness(model, device="cuda")
    tokens = PROMPTS["r4"]
    expected = reference.logits_of(tokens)
    torch.testing.assert_close(cuda.logits_of(tokens).cpu(), expected, rtol=1e-3, atol=1e-4)


def test_graphs_give_the_eager_tokens(model: Path) -> None:
    harness = Harness(model, device="cuda")
    submits = [submit(name, prompt, max_tokens=24) for name, prompt in PROMPTS.items()]
    replayed = harness.run(submits)
    runner = harness.started.runner
    runner._replay = EagerReplay(runner._replay._model)
    harness.fresh()
    eager = harness.run(submits)
    assert {n: r.tokens for n, r in replayed.items()} == {n: r.tokens for n, r in eager.items()}


def test_bfloat16_serves(model: Path) -> None:
    results = Harness(model, dtype="auto", device="cuda").run([submit("r", PROMPTS["r2"], max_tokens=16)])
    assert len(results["r"].tokens) == 16


def test_events_add_up_to_the_turn() -> None:
    clock, x = EventClock(), torch.rand(2048, 2048, device="cuda")
    torch.mm(x, x)
    clock.turn(on=True)
    for _ in range(50):
        clock.run(Kind.MATRICES, torch.mm, x, x)
    spent_ns, all_ns = clock.turn(on=False)
    assert spent_ns[Kind.MATRICES] > spent_ns[Kind.PYTHON] >= 0
    assert sum(spent_ns) == pytest.approx(all_ns, rel=0.1)
