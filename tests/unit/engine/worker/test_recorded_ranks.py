"""Recorded steps of several ranks: a program from each collective to the next, bit for bit as one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.replay import EagerReplay, RecordedReplay
from firstlight.facts.description import ModelDescription
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.eagle3 import write_pair
from support.engines import Harness
from support.experts import description_of, kimi, write_experts
from support.thread_ranks import ThreadRanks

SIZES = {"max_batched_tokens": 64, "max_num_seqs": 8, "cpu_kernels": "native"}
MODELS: dict[str, ModelDescription] = {
    "shares of two and one": tiny_description(
        num_heads=9, num_kv_heads=3, attention_bias=True, output_bias=True, mlp_bias=True
    ),
    "tied, with norms of q and k": tiny_description("qwen3", tie_embeddings=True),
    "latents, grouped experts": kimi(),
    "experts of qwen3": description_of("qwen3_moe"),
    "experts of mixtral": description_of("mixtral"),
}
TOKENS = [3 + (7 * n) % 40 for n in range(50)]
PAGES = (0, 0, [1, 2, 3, 4])
PLANS = [
    StepPlan(0, [0], [0], [50], TOKENS, [49], [PAGES]),
    StepPlan(1, [0] * 50, list(range(50)), [1] * 50, TOKENS, list(range(50)), [PAGES]),
]


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    description = MODELS[request.param]
    if description.experts is not None:
        return write_experts(tmp_path / "m", description)
    return write_hf_folder(tmp_path / "m", description, random_weights(description))


def test_the_states_that_a_drafter_gets_are_the_whole_sums(tmp_path: Path) -> None:
    """Not a rank's share of them; and only rank 0 keeps any."""
    target, drafter = write_pair(tmp_path)
    drafting = {**SIZES, "drafter": str(drafter)}
    alone = Harness(target, dtype="auto", **drafting).started.runner
    ranks = ThreadRanks(target, 2, **drafting)
    for plan in PLANS:
        alone.run(plan)
        ranks.logits(plan)
        torch.testing.assert_close(ranks.started[0].runner.states, alone.states, rtol=1e-3, atol=1e-3)
    assert [rank.drafter is not None for rank in ranks.started] == [True, False]
    assert ranks.started[1].runner._states_TCH is None


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_recorded_equals_eager_and_one_rank(folder: Path, kv_dtype: str) -> None:
    alone = Harness(folder, dtype="auto", kv_dtype=kv_dtype, **SIZES).started.runner
    ranks = ThreadRanks(folder, 2, kv_dtype=kv_dtype, **SIZES)
    recorded = [ranks.logits(plan) for plan in PLANS]
    most = 1e-4 if kv_dtype == "auto" else 5e-3  # codes may round the other way
    for plan, logits in zip(PLANS, recorded, strict=True):
        torch.testing.assert_close(logits, alone.run(plan), rtol=most, atol=most)
    for rank in ranks.started:
        assert isinstance(rank.runner.replay, RecordedReplay)
        rank.runner._replay = EagerReplay(rank.runner._replay._model)
    for plan, logits in zip(PLANS, recorded, strict=True):
        assert ranks.logits(plan).equal(logits)
