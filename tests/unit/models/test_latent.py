"""Latent attention: the plain form equals the absorbed one, and both are what the runner says they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker import startup
from firstlight.engine.worker.model_runner import ModelRunner
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.models.layers.latent import LatentAttention
from firstlight.ops.collectives import Group
from firstlight.ops.cuda.backend import CudaBackend
from support.experts import kimi, write_experts

PAGES = [(0, 0, [1, 2, 3, 4]), (1, 0, [5, 6, 7, 8])]
TOKENS = [3 + (7 * n) % 40 for n in range(50)]
OTHERS = [3 + (5 * n) % 40 for n in range(40)]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which form each layer took, in order."""
    taken: list[str] = []
    plain = LatentAttention._plain

    def seen(self, *args):  # type: ignore[no-untyped-def]
        taken.append("plain")
        return plain(self, *args)

    monkeypatch.setattr(LatentAttention, "_plain", seen)
    return taken


def runner_of(folder: Path, dtype: str = "float32") -> ModelRunner:
    section = EngineSection(threads=1, kv_memory_bytes=2**22, max_num_seqs=8, max_batched_tokens=128)
    return startup.start(open_checkpoint(folder), dtype, section, Group(), lambda *_, **__: None).runner


def test_the_plain_form_equals_the_absorbed_one(
    tmp_path: Path, forms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On operators without a promise of bits: whole prompts expand their latents, later rows do not."""
    folder = write_experts(tmp_path / "m", kimi())
    ops = CudaBackend("its arithmetic", torch.device("cpu"), torch.float32)
    monkeypatch.setattr(startup, "pick_backend", lambda *_: ops)
    runner = runner_of(folder)
    last = [len(TOKENS) - 1, len(TOKENS) + len(OTHERS) - 1]
    both = StepPlan(0, [0, 1], [0, 0], [len(TOKENS), len(OTHERS)], TOKENS + OTHERS, last, PAGES)
    whole = runner.run(both).clone()
    assert forms == ["plain"] * 3
    forms.clear()
    runner.run(StepPlan(1, [0, 1], [0, 0], [1, 1], [TOKENS[0], OTHERS[0]], [], PAGES))
    rest = StepPlan(
        2, [0, 1], [1, 1], [len(TOKENS) - 1, len(OTHERS) - 1], TOKENS[1:] + OTHERS[1:],
        [len(TOKENS) - 2, len(TOKENS) + len(OTHERS) - 3], [],
    )  # fmt: skip
    absorbed = runner.run(rest)
    assert forms == []
    torch.testing.assert_close(whole, absorbed, rtol=0, atol=2e-5 * float(absorbed.abs().max()))


def test_operators_that_promise_bits_never_expand(tmp_path: Path, forms: list[str]) -> None:
    runner = runner_of(write_experts(tmp_path / "m", kimi()))
    runner.run(StepPlan(0, [0], [0], [len(TOKENS)], TOKENS, [len(TOKENS) - 1], PAGES))
    assert forms == []


def test_what_both_forms_leave_in_the_pool_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a prompt that was expanded can be continued, and found in the prefix cache."""
    folder = write_experts(tmp_path / "m", kimi())
    reference = runner_of(folder)
    plan = StepPlan(0, [0], [0], [len(TOKENS)], TOKENS, [len(TOKENS) - 1], PAGES)
    expected = reference.run(plan).clone()
    ops = CudaBackend("its arithmetic", torch.device("cpu"), torch.float32)
    monkeypatch.setattr(startup, "pick_backend", lambda *_: ops)
    runner = runner_of(folder)
    assert float((runner.run(plan) - expected).abs().max() / expected.abs().max()) < 1e-4
    for mine, theirs in zip(runner._pool.keys, reference._pool.keys, strict=True):
        torch.testing.assert_close(mine[16:66], theirs[16:66], rtol=1e-4, atol=1e-4)
