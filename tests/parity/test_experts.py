"""Logits of models with experts and latent attention against transformers: tiny ones, every parameter random.

The reference at every position, to 1e-4 of the largest logit; our own kernels over the same float32 weights
to what keys and values in float16 round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import Harness, submit
from support.transformers_experts import CONFIGS, kimi_k25, save_kimi_k25
from support.transformers_models import difference, logits_of, random_model, random_tokens, save

NUM_TOKENS = 150  # beyond the windows, and beyond the original positions of the scaled ropes
NATIVE_TOLERANCE = 0.005


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name])
    tokens = random_tokens(NUM_TOKENS, CONFIGS[name].vocab_size)
    expected = logits_of(model, tokens)
    save(model, tmp_path)
    reference = Harness(tmp_path)
    assert difference(reference.logits_of(tokens), expected) < 1e-4
    for num in (1, 33, NUM_TOKENS):
        assert difference(reference.last_logits_of(tokens[:num])[None], expected[num - 1 : num]) < 1e-4
    native = Harness(tmp_path, dtype="auto", cpu_kernels="native")
    errors = (native.logits_of(tokens) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < NATIVE_TOLERANCE
    # A few tokens are so close between two experts that a rounded key decides.
    assert float(errors.quantile(0.95)) < 10 * NATIVE_TOLERANCE


@pytest.mark.parametrize("name", ["deepseek v3 yarn in groups, 3 dense", "minimax m2"])
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name], seed=2)
    save(model, tmp_path)
    prompt = random_tokens(40, CONFIGS[name].vocab_size)
    result = Harness(tmp_path).run([submit("a", prompt, max_tokens=30, ignore_eos=True)])["a"]
    expected = logits_of(model, prompt + result.tokens)[len(prompt) - 1 : -1]
    assert result.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("text_type", ["deepseek_v3", "kimi_k2"])
def test_the_language_model_of_kimi_k25(tmp_path: Path, text_type: str) -> None:
    """With the publisher's names and nesting; images are skipped with a line that says so."""
    model = kimi_k25()
    tokens = random_tokens(NUM_TOKENS, 96)
    expected = logits_of(model, tokens)
    save_kimi_k25(model, tmp_path)
    path = tmp_path / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["text_config"]["model_type"] = text_type
    path.write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration_kimi_k25.Config"}}))
    engine = Harness(tmp_path)
    assert difference(engine.logits_of(tokens), expected) < 1e-4
    (note,) = engine.started.report["checkpoint_notes"]
    assert note.startswith("skipped ")
    assert note.endswith(" for images: only text is served")
    assert engine.started.report["architecture"] == text_type
