"""The CUDA backend's arithmetic and the replay of recorded steps, on a CPU device against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker import startup
from firstlight.engine.worker.cuda_replay import CudaGraphReplay
from firstlight.ops.cuda.backend import CudaBackend
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness, submit

PROMPTS = {f"r{i}": [(7 * i + 3 * j) % 60 + 1 for j in range(5 + 9 * i)] for i in range(5)}


@pytest.fixture(scope="module", params=[(), (1,)], ids=["windows", "a full layer"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description("mistral", sliding_window=24, full_layers=request.param)
    return write_hf_folder(tmp_path_factory.mktemp("model"), description, random_weights(description))


def cuda_harness(model: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    backend = CudaBackend("test", torch.device("cpu"), torch.float32)
    monkeypatch.setattr(startup, "pick_backend", lambda *_: backend)
    return Harness(model)


def test_the_backend_gives_the_reference_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Harness(model)
    cuda = cuda_harness(model, monkeypatch)
    tokens = PROMPTS["r4"]
    torch.testing.assert_close(cuda.logits_of(tokens), reference.logits_of(tokens), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        cuda.last_logits_of(tokens), reference.last_logits_of(tokens), rtol=1e-4, atol=1e-5
    )


def test_replayed_steps_give_the_eager_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = cuda_harness(model, monkeypatch)
    submits = [
        submit(name, prompt, max_tokens=12 + 3 * i) for i, (name, prompt) in enumerate(PROMPTS.items())
    ]
    eager = harness.run(submits)
    recorded: list[Callable[[], torch.Tensor]] = []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorded.append(run)
        return run  # a graph on a CPU: the same operators again, on the inputs as they are then

    runner = harness.started.runner
    runner._replay = CudaGraphReplay(runner._replay._model, record)
    harness.fresh()
    replayed = harness.run(submits)
    assert {name: result.tokens for name, result in replayed.items()} == {
        name: result.tokens for name, result in eager.items()
    }
    assert 1 <= len(recorded) <= 4, "one recording for each power of two of running sequences"


def test_replayed_steps_leave_the_eager_states(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = cuda_harness(model, monkeypatch).started.runner
    decoder = runner._replay._model
    runner.capture(decoder, (0, 1, 2))
    pages = [(n, 0, [n + 1]) for n in range(3)]
    step = StepPlan(0, [0, 1, 2], [0, 0, 0], [1, 1, 1], [5, 6, 7], [0, 1, 2], pages)
    runner.run(step)
    eager = runner.states.clone()
    runner._replay = CudaGraphReplay(decoder, lambda run: run)
    for _ in range(2):
        runner.run(step)
        torch.testing.assert_close(runner.states, eager)


def test_open_names_the_remedy_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(startup.UnsupportedError, match="no CUDA support") as caught:
        CudaBackend.open("auto", 0)
    assert "TORCH_SPEC" in caught.value.hint
