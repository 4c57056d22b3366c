"""Captured states: what they are, and that they are the same however a token comes and whatever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.model_runner import ModelRunner
from firstlight.engine.worker.replay import EagerReplay, RecordedReplay
from firstlight.engine.worker.startup import start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.description import ModelDescription
from firstlight.ops.collectives import Group
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.experts import kimi, write_experts

TOKENS = [3 + (7 * n) % 40 for n in range(50)]
PAGES = (0, 0, [1, 2, 3, 4])
WHOLE = StepPlan(0, [0], [0], [50], TOKENS, [49], [PAGES])
LAYERS = (2, 0, 4, 3)
MODELS: dict[str, ModelDescription] = {
    "plain": tiny_description(num_layers=4),
    "tied, with norms of q and k": tiny_description("qwen3", num_layers=4, tie_embeddings=True),
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "m", MODELS[request.param], random_weights(MODELS[request.param]))


def runner_of(folder: Path, dtype: str, layers: tuple[int, ...] = LAYERS, **sizes: object) -> ModelRunner:
    section = EngineSection(
        **{"threads": 1, "kv_memory_bytes": 2**22, "max_num_seqs": 8, "max_batched_tokens": 64, **sizes}
    )
    return start(open_checkpoint(folder), dtype, section, Group(), lambda *_, **__: None, layers).runner


def test_state_k_is_the_residual_stream_after_k_blocks(folder: Path) -> None:
    """Of a model with fewer blocks, the last state is that of the same number in the whole model."""
    runner = runner_of(folder, "float32")
    logits = runner.run(WHOLE)
    states = runner.states
    assert states.shape == (50, 4, 64)
    decoder = runner.replay._model  # type: ignore[union-attr]
    embedded = decoder._embedding(torch.tensor(TOKENS))
    assert states[:, LAYERS.index(0)].equal(embedded)
    normed = decoder._ops.rms_norm(states[-1:, LAYERS.index(4)], decoder._norm.values, 1e-5)
    assert decoder._head(normed).equal(logits)
    for num in (2, 3):
        decoder._blocks, cut = decoder._blocks[:num], decoder._blocks
        decoder.capture((num,))
        runner._states_CH = (1, 64)
        runner.run(WHOLE)
        assert runner.states[:, 0].equal(states[:, LAYERS.index(num)])
        decoder._blocks = cut


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_chunks_and_single_tokens_leave_the_same_states_as_a_whole_prompt(folder: Path, dtype: str) -> None:
    runner = runner_of(folder, dtype, cpu_kernels="native")
    runner.run(WHOLE)
    whole = runner.states.clone()
    single = StepPlan(1, [0] * 50, list(range(50)), [1] * 50, TOKENS, [3], [PAGES])
    runner.run(single)
    assert runner.states.equal(whole)
    for start_, stop in ((0, 7), (7, 40), (40, 50)):
        runner.run(StepPlan(2, [0], [start_], [stop - start_], TOKENS[start_:stop], [], [PAGES]))
        assert runner.states.equal(whole[start_:stop])


def test_recorded_steps_leave_the_states_and_logits_of_eager_ones(folder: Path) -> None:
    runner = runner_of(folder, "auto", cpu_kernels="native")
    logits, states = runner.run(WHOLE).clone(), runner.states.clone()
    assert isinstance(runner.replay, RecordedReplay)
    runner._replay = EagerReplay(runner.replay._model)
    assert runner.run(WHOLE).equal(logits)
    assert runner.states.equal(states)
    plain = runner_of(folder, "auto", (), cpu_kernels="native")
    assert plain.run(WHOLE).equal(logits)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_latent_attention_and_experts_leave_their_states_too(tmp_path: Path, dtype: str) -> None:
    folder = write_experts(tmp_path / "m", kimi(num_layers=4))
    test_chunks_and_single_tokens_leave_the_same_states_as_a_whole_prompt(folder, dtype)
    if dtype == "float32":
        test_state_k_is_the_residual_stream_after_k_blocks(folder)
