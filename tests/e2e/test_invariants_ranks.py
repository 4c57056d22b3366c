"""Two ranks give what one gives, through real processes; a rank that dies ends the engine and is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from firstlight.base.failure import read_failure
from firstlight.engine.messages import Drain, SequenceOutput, Submit
from firstlight.facts.sources import resolve_model
from firstlight.models.eagle3_file import save_eagle3
from firstlight.text.model import TextModel
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.drafters import LATENT
from support.eagle3 import tiny_eagle3, write_pair
from support.engines import Harness, submit
from support.experts import description_of, kimi, write_experts
from support.prompts import PROMPTS
from support.rank_processes import RankProcesses, logprobs_of, tokens_of
from support.workloads import circling, requests

pytestmark = pytest.mark.timeout(600)  # two processes that import torch, on a machine that may be busy
VOCABULARY = 501  # 251 and 250 tokens of the head
SIZES = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads and three blocks of the inner width: shares of two and one."""
    description = tiny_description(
        num_heads=9,
        num_kv_heads=3,
        vocab_size=VOCABULARY,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "m", description, random_weights(description))


def assert_equal_to_one_rank(
    path: Path, workload: list[Submit], drafting: Mapping[str, Any] = MappingProxyType({}), **sizes: int
) -> dict[str, list[SequenceOutput]]:
    alone = Harness(path, **sizes).run(workload)
    with RankProcesses(path, 2, **sizes, **drafting) as ranks:
        ready = ranks.wait_until_ready()
        assert ready.max_model_len == sizes["max_model_len"]
        together = ranks.run(workload)
        assert ranks.drain() == [0, 0]
    for item in workload:
        name = item.request_id
        assert tokens_of(together[name]) == alone[name].tokens, name
        assert together[name][-1].finish_reason == alone[name].finish_reason
        expected = [entry.logprob for entry in alone[name].logprobs]
        assert logprobs_of(together[name]) == pytest.approx(expected, abs=1e-4)
    return together


def assert_same_drafts(
    target: Path, workload: list[Submit], drafting: Mapping[str, Any], sizes: Mapping[str, int]
) -> int:
    """Two ranks accept what one accepts; how many that are."""
    alone = Harness(target, **sizes, **drafting).run(workload)
    together = assert_equal_to_one_rank(target, workload, drafting, **sizes)
    accepted = {name: sum(output.num_accepted for output in outputs) for name, outputs in together.items()}
    assert accepted == {name: result.num_accepted for name, result in alone.items()}
    return sum(accepted.values())


def test_two_ranks_equal_one_on_a_tiny_model(folder: Path) -> None:
    assert_equal_to_one_rank(folder, requests(16, VOCABULARY), **SIZES)


@pytest.mark.parametrize("model", ["kimi_k2", "minimax_m2"])
def test_two_ranks_equal_one_with_experts(tmp_path: Path, model: str) -> None:
    """Each has a share of every expert, and all latents; or half the heads of a norm over all of them."""
    description = description_of(model, vocab_size=VOCABULARY)
    assert_equal_to_one_rank(write_experts(tmp_path / "m", description), requests(8, VOCABULARY), **SIZES)


def test_two_ranks_draft_what_one_rank_drafts_over_experts(tmp_path: Path) -> None:
    # Of other weights (seed 0) a token lies between two experts by 6e-8, and ranks add up otherwise.
    target = write_experts(tmp_path / "target", kimi(num_layers=4, vocab_size=96, max_position=128), seed=1)
    (tmp_path / "drafter").mkdir()
    save_eagle3(tmp_path / "drafter", tiny_eagle3(**LATENT), torch.float32)
    drafting = {"drafter": str(tmp_path / "drafter"), "draft_tokens": 3, "draft_adapt": False}
    drafting["expert_parallel"] = True  # of the others each rank has a share of every expert
    workload = [
        submit(f"{n}", range(3 + n, 30), max_tokens=20, ignore_eos=True, logprobs=1) for n in range(4)
    ]
    sizes = {**SIZES, "max_model_len": 128}
    assert_same_drafts(target, workload, drafting, sizes)


def test_two_ranks_with_drafts_equal_one_without(folder: Path) -> None:
    workload = [*requests(8, VOCABULARY, max_tokens=20), *circling(8)]
    drafting = {"drafter": "ngram", "draft_tokens": 4, "draft_adapt": False}
    together = assert_equal_to_one_rank(folder, workload, drafting, **SIZES)
    assert sum(output.num_accepted for outputs in together.values() for output in outputs) > 100


@pytest.mark.parametrize("tree", [{}, {"draft_top_k": 4, "draft_nodes": 14}], ids=["chain", "tree"])
def test_two_ranks_draft_what_one_rank_drafts(tmp_path: Path, tree: dict[str, int]) -> None:
    """With a drafter over captured states: they are sums over the ranks."""
    target, drafter = write_pair(tmp_path)
    drafting = {"drafter": str(drafter), "draft_tokens": 3, "draft_adapt": False, **tree}
    sizes = {**SIZES, "max_model_len": 128}
    hot = {"temperature": 4.0, "max_tokens": 30, "ignore_eos": True}
    workload = [submit(f"{n}", range(3 + n, 30), seed=n, logprobs=1, **hot) for n in range(8)]
    assert assert_same_drafts(target, workload, drafting, sizes) > 20


def test_two_ranks_equal_one_on_the_real_model() -> None:
    """Quantised blocks are cut between the ranks: 9 heads, 3 of them with KV, 4-bit rows and columns."""
    path = resolve_model(None)
    assert_equal_to_one_rank(path, real_workload(path), **SIZES)


def test_two_ranks_record_their_steps_with_our_own_kernels() -> None:
    """Over gloo. The ranks' sums are made in another order than one rank's, and 8-bit codes may then round
    the other way: 1e-3 KL a token, so first tokens are compared. Bits: `unit/engine/test_recorded_ranks`."""
    path = resolve_model(None)
    workload = real_workload(path)
    alone = Harness(path, dtype="auto", cpu_kernels="native", **SIZES).run(workload)
    with RankProcesses(path, 2, dtype="auto", cpu_kernels="native", **SIZES) as ranks:
        assert ranks.wait_until_ready().report["backend"].startswith("cpu-native")
        together = ranks.run(workload)
        assert ranks.drain() == [0, 0]
    for item in workload:
        mine, theirs = alone[item.request_id], together[item.request_id]
        assert len(tokens_of(theirs)) == 12
        if tokens_of(theirs)[0] == mine.tokens[0]:
            assert logprobs_of(theirs)[0] == pytest.approx(mine.logprobs[0].logprob, abs=0.2)
        else:
            assert item.params.temperature > 0.0, item.request_id


def real_workload(path: Path) -> list[Submit]:
    text = TextModel.load(path)
    return [
        submit(
            str(n),
            text.encode(prompt),
            max_tokens=12,
            logprobs=1,
            temperature=0.8 * (n % 2),
            seed=n,
            ignore_eos=True,
        )
        for n, prompt in enumerate(PROMPTS[:6])
    ]


def test_a_killed_rank_ends_the_engine_with_the_collective_s_name(folder: Path) -> None:
    with RankProcesses(folder, 2, collective_deadline_s=60.0, **SIZES) as ranks:
        ranks.wait_until_ready()
        ranks.send(submit("a", [1, 2, 3], max_tokens=250, ignore_eos=True))
        while not getattr(ranks.receive(), "outputs", []):
            pass
        ranks.processes[1].kill()
        failed = ranks.until_failed()
        assert "rank 0: collective '" in failed.message
        assert "number " in failed.message
        assert "log in the run directory" in failed.hint
        assert ranks.processes[0].wait(60) == failed.exit_code == 6
        words = read_failure(ranks.run_dir, "rank-0")
        assert words is not None
        assert words.message == failed.message


def test_a_model_that_cannot_be_shared_says_so(tmp_path: Path) -> None:
    description = tiny_description(num_kv_heads=1)
    write_hf_folder(tmp_path / "m", description, random_weights(description))
    with RankProcesses(tmp_path / "m", 2) as ranks:
        failed = ranks.until_failed()
        assert (
            "--tensor-parallel 2 does not fit this model: it has 4 attention heads and 1 key-value head,"
            in failed.message
        )
        assert "--tensor-parallel 1" in failed.hint
        assert ranks.processes[0].wait(60) == 2


@pytest.mark.parametrize(("deadline_s", "reason"), [(60.0, "length"), (0.0, "abort")])
def test_a_drain_lets_requests_finish_until_its_deadline(
    folder: Path, deadline_s: float, reason: str
) -> None:
    with RankProcesses(folder, 1, **SIZES) as ranks:
        ranks.wait_until_ready()
        ranks.send(submit("a", [1, 2, 3], max_tokens=200, ignore_eos=True))
        ranks.send(Drain(deadline_s))
        outputs = ranks.outputs_until_end("a")
        assert outputs[-1].finish_reason == reason
        assert ranks.processes[0].wait(60) == 0
