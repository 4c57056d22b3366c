"""Models with experts in several ranks, each with a share of all experts or with whole ones: what one gives.

In float32. Every rank sends a token to the same experts, since all choose from the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.loading.fit import require_fit
from firstlight.models.declare import Declaration
from firstlight.models.registry import find
from firstlight.ops import expert_layer
from firstlight.ops.collectives import Group
from firstlight.ops.reference import ReferenceBackend
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness
from support.experts import GROUPED, description_of, kimi, write_experts
from support.thread_ranks import ThreadRanks

# Widths of the dense layer and of the shared experts that four ranks can share.
KIMI = kimi(intermediate_size=128, experts=replace(GROUPED, inner_size=128, shared_size=128))
SIZES = {"max_batched_tokens": 64, "max_num_seqs": 8}
LAYERS = (0, 1, 2, 3)
TOKENS = [3 + (7 * n) % 40 for n in range(50)]
PAGES = (0, 0, [1, 2, 3, 4])
PLANS = [
    StepPlan(0, [0], [0], [50], TOKENS, [49], [PAGES]),
    StepPlan(1, [0] * 50, list(range(50)), [1] * 50, TOKENS, list(range(50)), [PAGES]),
    # One token: most ranks have none of its experts.
    StepPlan(2, [0], [49], [1], TOKENS[49:], [0], [PAGES]),
]


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every choice of experts that is made from now on, on any rank."""
    made: list[torch.Tensor] = []
    choose = expert_layer.choose_experts

    def choose_and_keep(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = choose(*arguments)
        made.append(torch.cat((chosen.float(), weights), 1))
        return chosen, weights

    monkeypatch.setattr(expert_layer, "choose_experts", choose_and_keep)
    return made


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "expert_parallel"),
    [("kimi_k2", 2, True), ("kimi_k2", 4, False), ("kimi_k2", 4, True), ("qwen3_moe", 2, True)],
)
def test_several_ranks_equal_one(
    tmp_path: Path, routes: list[torch.Tensor], architecture: str, num_ranks: int, expert_parallel: bool
) -> None:
    """Logits, tokens and captured states."""
    description = KIMI if architecture == "kimi_k2" else description_of(architecture)
    path = write_experts(tmp_path / "m", description)
    alone = ThreadRanks(path, 1, "float32", LAYERS, **SIZES)
    sizes = {**SIZES, "expert_parallel": expert_parallel}
    ranks = ThreadRanks(path, num_ranks, "float32", LAYERS, **sizes)
    for plan in PLANS:
        expected = alone.logits(plan)
        own, states = len(routes), alone.started[0].runner.states
        got = ranks.logits(plan)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        assert got.argmax(-1).equal(expected.argmax(-1))
        for rank in ranks.started:
            torch.testing.assert_close(rank.runner.states, states, rtol=0, atol=1e-4)
            assert rank.runner.states.equal(ranks.started[0].runner.states)
        for route in routes[own:]:
            assert sum(route.equal(other) for other in routes[own:]) >= num_ranks
        routes.clear()


def test_each_rank_holds_whole_experts() -> None:
    """Twelve experts of three ranks, whose widths stay whole."""
    held: list[str] = []
    for rank in range(3):
        declare = Declaration(ReferenceBackend("test"), Group(rank, 3), expert_parallel=True)
        find(KIMI.architecture)(declare, KIMI)
        of_layer = [wanted for wanted in declare.wanted if "layers.1.mlp.experts." in wanted.name]
        assert len(of_layer) == 4 * 3
        shapes = {wanted.slice_shape for wanted in of_layer}
        assert shapes == {(128, KIMI.hidden_size), (KIMI.hidden_size, 128)}
        held += [wanted.name for wanted in of_layer]
    assert len(set(held)) == 12 * 3


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    dense = write_hf_folder(tmp_path / "d", tiny_description(), random_weights(tiny_description()))
    section = EngineSection(tensor_parallel=2, expert_parallel=True)
    with pytest.raises(UsageError, match="--expert-parallel does not fit this model: llama has no experts"):
        require_fit(open_checkpoint(dense), section)
    few = write_experts(tmp_path / "e", description_of("mixtral", num_kv_heads=8, num_heads=8))
    with pytest.raises(UsageError, match="6 experts cannot be shared by 7 ranks"):
        require_fit(open_checkpoint(few), EngineSection(tensor_parallel=7, expert_parallel=True))


def test_our_own_kernels_hold_whole_experts(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "m", KIMI)
    native = {**SIZES, "cpu_kernels": "native"}
    alone = Harness(path, dtype="auto", **native).started.runner
    ranks = ThreadRanks(path, 2, expert_parallel=True, **native)
    for plan in PLANS:
        torch.testing.assert_close(ranks.logits(plan), alone.run(plan), rtol=2e-2, atol=2e-2)
