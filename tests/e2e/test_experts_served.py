"""A Kimi in small with the drafters that the pipeline makes for it, served by one rank and by two.

Its experts are packed and its attention is latent; of its drafters one has attention in heads, the other over
latents. They know the target's few answers by heart, so that nearly every draft must be right.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from msgspec.structs import replace

from firstlight.drafter.explain.ranks import states_of_ranks
from firstlight.drafter.export import GGUF, NATIVE, SGLANG, SPECULATORS, VLLM
from firstlight.drafter.gates import unroll_gate
from firstlight.drafter.make_drafter import initialise, new_drafter
from firstlight.drafter.objective import make_teacher, unrolled
from firstlight.drafter.packing import rows_of
from firstlight.drafter.shards import read_shard
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import read_ends
from firstlight.drafter.train_settings import HEADS, LATENT
from firstlight.facts.checkpoint.drafter_config import LAYER_IDS
from firstlight.models.eagle3_latent import make_drafter
from support.kimi_run import ANSWER_TOKENS, TRAINING, KimiRun, make_kimi_run
from support.serving import RunningServer

pytestmark = pytest.mark.timeout(600)
NUM_DRAFTS = 3
FLAGS = ("--threads", "1", "--dtype", "float32", "--max-model-len", "512")
DRAFTING = ("--no-draft-adapt", "--draft-tokens", str(NUM_DRAFTS))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> KimiRun:
    return make_kimi_run(tmp_path_factory.mktemp("kimi"))


@pytest.mark.parametrize(("attention", "num_ranks"), [(HEADS, 1), (LATENT, 2)])
def test_drafts_learnt_by_heart_are_taken_and_change_no_token(
    run: KimiRun, attention: str, num_ranks: int
) -> None:
    drafter = str(run.outs[attention] / "export" / NATIVE)
    flags = (*FLAGS, "--drafter", drafter, *DRAFTING, "--tensor-parallel", str(num_ranks))
    with (
        RunningServer(run.target.path, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert "kimi_k2" in str(client.get("/server_info").json())
        for answer in run.answers:
            body = {"prompt": answer.prompt_token_ids, "temperature": 0, "max_tokens": ANSWER_TOKENS}
            for is_again in (False, True):
                reply = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
                assert reply["choices"][0]["token_ids"] == answer.token_ids
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached > 15 if is_again else cached < 32
        drafts = client.get("/server_info").json()["engine"]["drafts"]
    assert drafts["acceptance_length"] > 0.85 * (NUM_DRAFTS + 1), drafts


def test_ranks_capture_sums_and_no_parts(run: KimiRun) -> None:
    """On our own kernels; states of another rank's part alone are those of a drafter that fails."""
    tokens = (run.answers[0].prompt_token_ids + run.answers[0].token_ids)[:40]
    alone = states_of_ranks(run.target, 1, (0, 1, 2, 3), tokens, "native")[0]
    first, second = states_of_ranks(run.target, 2, (0, 1, 2, 3), tokens, "native")
    assert first.equal(second)
    torch.testing.assert_close(first, alone, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("attention", [HEADS, LATENT])
def test_training_equals_serving(run: KimiRun, attention: str) -> None:
    captured = run.outs[attention] / "capture"
    shard = read_shard(captured / min(read_manifest(captured).files))
    gate = unroll_gate(run.target, shard, read_ends(run.target.checkpoint), attention)
    assert gate.passed, gate.said


@pytest.mark.parametrize("attention", [HEADS, LATENT])
def test_first_weights_know_something_already(run: KimiRun, attention: str) -> None:
    captured = run.outs[attention] / "capture"
    shards = [captured / name for name in read_manifest(captured).files]
    ends, norm_eps = read_ends(run.target.checkpoint), run.target.checkpoint.description.norm_eps
    fitted = new_drafter(run.target, ends, shards, replace(TRAINING, attention=attention)).drafter
    plain = make_drafter(fitted.config, ends.embedding)
    plain.target_ids_R.copy_(fitted.target_ids_R)
    initialise(plain, ends)
    teacher = make_teacher(ends, fitted.target_ids_R, norm_eps)
    (row, *_) = rows_of(read_shard(shards[0]), 10_000, lambda document: True)
    with torch.no_grad():
        losses = [float(unrolled(drafter, teacher, row, 1, 1.0).losses_S[0]) for drafter in (fitted, plain)]
    assert losses[0] < 0.5 * losses[1]


def test_each_engine_gets_the_architecture_that_it_knows(run: KimiRun) -> None:
    def config(attention: str, engine: str) -> dict:
        return json.loads((run.outs[attention] / "export" / engine / "config.json").read_text())

    for attention, name in ((HEADS, "LlamaForCausalLMEagle3"), (LATENT, "Eagle3DeepseekV2ForCausalLM")):
        for engine in (NATIVE, VLLM, SGLANG):
            assert config(attention, engine)["architectures"] == [name]
        ids = config(attention, NATIVE)[LAYER_IDS]
        assert config(attention, SGLANG)["eagle_config"][LAYER_IDS] == [layer - 1 for layer in ids]
        assert config(attention, VLLM)["rope_scaling"]["rope_theta"] == 50000.0
    verifier = config(HEADS, SPECULATORS)["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config(LATENT, VLLM)["model_type"] == "deepseek_v3"
    # Engines that ignore what the file says take this factor for attention in heads.
    assert config(HEADS, VLLM)["rope_scaling"]["attention_factor"] == pytest.approx(1.4159, abs=1e-4)
    assert config(LATENT, VLLM)["rope_scaling"]["attention_factor"] == 1.0
    numbers = read_manifest(run.outs[LATENT] / "export").numbers
    for engine in (SPECULATORS, GGUF):
        assert "attention in heads only" in numbers[engine]
        assert not Path(run.outs[LATENT] / "export" / engine).exists()
