"""Logits of every architecture against transformers, on tiny models in which every parameter is random.

The reference at every position, to 1e-4 of the largest logit; the fast CPU operators to what their layouts
round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from firstlight.facts.hf.hf_config import describe_hf
from support.checkpoints import write_gguf
from support.engines import Harness, submit
from support.transformers_models import (
    CONFIGS,
    difference,
    logits_of,
    noise,
    random_model,
    random_tokens,
    save,
)

NUM_TOKENS = 150  # beyond the windows, and beyond the original positions of the scaled ropes
MIXED_WINDOWS = "mistral, some layers with a window"
FAST_TOLERANCE = 0.06  # bfloat16 products or 8-bit activations through 3 layers of random weights


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens_of(vocabulary: int) -> list[int]:
    return random_tokens(NUM_TOKENS, vocabulary)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name])
    tokens = tokens_of(CONFIGS[name].vocab_size)
    expected = logits_of(model, tokens)
    save(model, tmp_path)

    reference = Harness(tmp_path)
    assert difference(reference.logits_of(tokens), expected) < 1e-4
    for num in (1, 33, NUM_TOKENS):
        assert difference(reference.last_logits_of(tokens[:num])[None], expected[num - 1 : num]) < 1e-4

    fast = Harness(tmp_path, dtype="auto")
    assert noise(fast.logits_of(tokens), expected) < FAST_TOLERANCE
    # As a prompt runs: 33 and more rows of a sequence take the blocked attention.
    for num in (1, 33, NUM_TOKENS):
        assert noise(fast.last_logits_of(tokens[:num]), expected[num - 1]) < 2 * FAST_TOLERANCE


@pytest.mark.parametrize("name", ["llama 9 heads on 3", "mistral window", "qwen2", "qwen3", MIXED_WINDOWS])
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name], seed=2)
    save(model, tmp_path)
    prompt = tokens_of(CONFIGS[name].vocab_size)[:40]
    result = Harness(tmp_path).run([submit("a", prompt, max_tokens=40, ignore_eos=True)])["a"]
    expected = logits_of(model, prompt + result.tokens)[len(prompt) - 1 : -1]
    assert result.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model(CONFIGS["llama"], seed=3)
    save(model, tmp_path, dtype)
    tokens = tokens_of(96)
    expected = logits_of(model, tokens)
    assert difference(Harness(tmp_path).logits_of(tokens), expected) < 1e-4
    assert noise(Harness(tmp_path, dtype="auto").logits_of(tokens), expected) < FAST_TOLERANCE


def plain(_: str) -> GgmlType:
    return GgmlType.F32


MIXED = {
    "q_proj.weight": GgmlType.Q4_0,
    "k_proj.weight": GgmlType.Q4_1,
    "v_proj.weight": GgmlType.Q4_1,
    "o_proj.weight": GgmlType.F16,
    "gate_proj.weight": GgmlType.Q4_1,
    "up_proj.weight": GgmlType.Q8_0,
    "down_proj.weight": GgmlType.BF16,
    "embed_tokens.weight": GgmlType.Q8_0,
    "lm_head.weight": GgmlType.Q8_0,
}


def mixed(name: str) -> GgmlType:
    """Every format that we read, in one model; vectors are always float32."""
    return MIXED.get(".".join(name.split(".")[-2:]), GgmlType.F32)


# Rows of 144 values are no whole blocks: the model with 9 heads is not quantised here.
GGUF_CASES = [(name, plain) for name in ("llama", "llama tied", "llama 9 heads on 3", "qwen2", "qwen3")]
GGUF_CASES += [(name, mixed) for name in ("llama", "llama tied", "qwen2", "qwen3 tied")]


@pytest.mark.parametrize(("name", "format_of"), GGUF_CASES)
def test_gguf_files(tmp_path: Path, name: str, format_of: Callable[[str], GgmlType]) -> None:
    """Rows of q and k are permuted in the file, and blocks round: the oracle is given the rounded weights."""
    config = CONFIGS[name]
    model = random_model(config, seed=4)
    weights = {key: value.clone().numpy() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    path = write_gguf(tmp_path / "m.gguf", describe_hf(config.to_dict(), {}), weights, format_of=format_of)
    with torch.no_grad():
        for key, values in weights.items():
            kind = format_of(key)
            if kind != GgmlType.F32:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
                model.state_dict()[key].copy_(torch.from_numpy(rounded))
    tokens = tokens_of(config.vocab_size)
    expected = logits_of(model, tokens)
    assert difference(Harness(path).logits_of(tokens), expected) < 1e-4
    assert noise(Harness(path, dtype="auto").logits_of(tokens), expected) < FAST_TOLERANCE
