"""Tiny models in every format of quantised safetensors: the logits of their twins in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from firstlight import LLM, SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.ops.cpu import packed
from support.engines import Harness
from support.quantised import RECIPES, description, write_quantised
from support.serving import byte_tokenizer, write_tokenizer
from support.thread_ranks import ThreadRanks

NUM_TOKENS = 40
FAST_TOLERANCE = 0.06  # as of the other models


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens() -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(64) for _ in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_those_of_the_dequantised_twin(tmp_path: Path, name: str) -> None:
    folder = write_quantised(tmp_path, RECIPES[name])
    expected = Harness(folder / "twin").logits_of(tokens())
    assert torch.equal(Harness(folder).logits_of(tokens()), expected)
    fast = Harness(folder, dtype="auto").logits_of(tokens())
    assert float((fast - expected).norm() / expected.norm()) < FAST_TOLERANCE


SIZES = {"max_batched_tokens": 64, "max_num_seqs": 8, "cpu_kernels": "native"}
PLAN = StepPlan(0, [0], [0], [NUM_TOKENS], tokens(), [NUM_TOKENS - 1], [(0, 0, [1, 2, 3])])


@pytest.mark.parametrize("name", ["int4 group 32 asymmetric", "fp8 block", "awq", "gptq", "nvfp4"])
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    """256 inner columns, and heads of 32: shares are whole blocks of every format."""
    folder = write_quantised(tmp_path, RECIPES[name], description(num_layers=1))
    alone = Harness(folder, dtype="auto", **SIZES).started.runner
    ranks = ThreadRanks(folder, 2, **SIZES)
    torch.testing.assert_close(ranks.logits(PLAN), alone.run(PLAN), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int4 group 32", "int4 group 32 asymmetric", "int8", "fp8 block", "nvfp4"])
def test_nothing_wider_stays_in_memory(tmp_path: Path, name: str) -> None:
    """What the layers' matrices take in all is what the layout says, not two or four bytes a value."""
    folder = write_quantised(tmp_path, RECIPES[name], description(num_layers=1))
    harness = Harness(folder, dtype="auto", **SIZES)
    notes = [note for note in harness.started.report["layouts"] if " a value" in note]
    assert len(notes) == 4
    bits = {"int4 group 32": 4.5, "int4 group 32 asymmetric": 5, "int8": 8.5, "fp8 block": 9, "nvfp4": 6}[
        name
    ]
    assert all(f" {bits} bits a value" in note for note in notes)
    values = 256 * 128 + 128 * 128 + 3 * 128 * 256  # q, k and v; o; gate, up and down
    assert sum(packed_bytes(note) for note in notes) == values * bits / 8


def packed_bytes(note: str) -> int:
    """Of a line of the report: "layer FORMAT OxI: ..."."""
    _, weight_format, shape = note.partition(":")[0].split()
    outputs, inputs = map(int, shape.split("x"))
    return packed.packed_bytes(weight_format, (outputs, inputs))


def test_a_mixed_model_answers_as_its_twin(tmp_path: Path) -> None:
    """As Kimi-K2.5: attention in bfloat16, matrices of the feed-forward layers in four bits."""
    tokenizer = byte_tokenizer()
    model = description(vocab_size=tokenizer.get_vocab_size(), max_position=512)
    recipe = RECIPES["int4 group 32"]
    config = {**recipe.config, "ignore": ["lm_head", "re:.*self_attn.*"]}
    folder = write_quantised(
        tmp_path, recipe, model, chosen=lambda name: name.endswith("_proj.weight") and ".mlp." in name,
        config=config,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for path in (folder, folder / "twin"):
        write_tokenizer(path, tokenizer)
        llm = LLM(str(path), dtype="float32", threads=1, progress=False, max_model_len=128)
        answers.append(llm.generate("What is this?", params)[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 16
    assert set(open_checkpoint(folder).formats) == {"BF16", "INT4"}
