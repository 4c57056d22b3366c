"""A GGUF file of Q4_K and Q6_K, as most published ones are: served, converted, and judged by transformers.

The oracle is given the values that the gguf package reads from the blocks.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from firstlight.facts.hf.hf_config import describe_hf
from firstlight.loading.convert import convert_gguf
from support.checkpoints import quantise, write_gguf
from support.engines import Harness, submit
from support.transformers_models import logits_of, random_model

CONFIG = LlamaConfig(
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=200,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=True,
)
TOKENS = [(7 * n) % 190 + 3 for n in range(60)]


def as_published(name: str) -> GgmlType:
    """The mixture of Q4_K_M files: the embedding and some matrices in 6 bits."""
    if not name.endswith("weight") or "norm" in name:
        return GgmlType.F32
    return GgmlType.Q6_K if "embed" in name or "down" in name or "v_proj" in name else GgmlType.Q4_K


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The file, and transformers' model of the values in it."""
    torch.set_num_threads(1)
    model = random_model(CONFIG, seed=5)
    weights = {key: value.clone().numpy() for key, value in model.state_dict().items()}
    del weights["lm_head.weight"]
    path = tmp_path_factory.mktemp("nested") / "m.gguf"
    write_gguf(path, describe_hf(CONFIG.to_dict(), {}), weights, format_of=as_published)
    with torch.no_grad():
        for key, values in weights.items():
            kind = as_published(key)
            if kind != GgmlType.F32:
                read = gguf.quants.dequantize(quantise(values, kind), kind)
                model.state_dict()[key].copy_(torch.from_numpy(read))
    return path, model


def test_the_reference_reads_it_as_gguf_does(published: tuple[Path, PreTrainedModel]) -> None:
    path, model = published
    expected = logits_of(model, TOKENS)
    got = Harness(path).logits_of(TOKENS)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("kernels", ["auto", "stock"])
def test_the_fast_operators_serve_it(published: tuple[Path, PreTrainedModel], kernels: str) -> None:
    path, model = published
    expected = logits_of(model, TOKENS)
    harness = Harness(path, dtype="auto", threads=2, cpu_kernels=kernels)
    got = harness.logits_of(TOKENS)
    assert float((got - expected).norm() / expected.norm()) < 0.04
    result = harness.run([submit("a", TOKENS, max_tokens=5, ignore_eos=True)])["a"]
    assert len(result.tokens) == 5
    if kernels == "auto":
        assert any("Q4_K" in note and "unrounded" in note for note in harness.started.report["layouts"])


def test_it_converts(published: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    path, model = published
    folder = convert_gguf(path, tmp_path / "out", "{}", dtype="f32").folder
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(logits_of(converted, TOKENS), logits_of(model, TOKENS))
