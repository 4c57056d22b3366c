"""Converted models in transformers: equal weights, equal logits, equal tokens, and the capital of France.

The tiny models are made by transformers, written to GGUF by the gguf package, converted by us and loaded by
transformers again: nothing of ours is both judge and party. The real model is the embedded default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.names import huggingface_name
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.sources import resolve_model
from firstlight.loading.convert import convert_gguf
from firstlight.text.model import TextModel
from support.checkpoints import write_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied, biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama, linear rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}


def logits_of(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(token_ids).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_model_keeps_its_logits_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    original = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {key: value.numpy() for key, value in original.state_dict().items()}
    for key, value in weights.items():
        if value.ndim == 1:  # transformers starts norms at 1 and biases at 0: any mix-up would stay unseen
            weights[key] = value = value + np.random.default_rng(len(key)).normal(0, 0.1, value.shape).astype(
                np.float32
            )
            original.state_dict()[key].copy_(torch.from_numpy(value))
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    description = describe_hf(config.to_dict(), {})
    edit = add_linear_scaling if description.rope_scaling.kind == "linear" else None
    path = write_gguf(tmp_path / "m.gguf", description, weights, edit=edit)

    folder = convert_gguf(path, tmp_path / "out", "{}", dtype="f32").folder
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    assert type(converted) is type(original)
    token_ids = torch.arange(60).view(2, 30) + 3
    assert torch.equal(logits_of(converted, token_ids), logits_of(original, token_ids))


def add_linear_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def test_the_rope_factors_of_llama_3_keep_the_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SIZES, "head_dim": 64, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}
    )
    original = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / original.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8.0)
    weights = {key: value.numpy() for key, value in original.state_dict().items()}
    path = write_gguf(
        tmp_path / "m.gguf",
        describe_hf(config.to_dict(), {}),
        weights,
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    folder = convert_gguf(path, tmp_path / "out", "{}", dtype="f32").folder
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.arange(60).view(1, 60) + 3
    assert torch.equal(logits_of(converted, token_ids), logits_of(original, token_ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_of_transformers_are_understood(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    description = checkpoint.description
    assert description == describe_hf(config.to_dict(), {})
    assert description.architecture == config.model_type
    assert description.tie_embeddings == config.tie_word_embeddings
    assert description.sliding_window == getattr(config, "sliding_window", None)
    assert checkpoint.formats.keys() == {"BF16"}


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="module")
def folder(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model"
    return convert_gguf(gguf_path, target, TextModel.load(gguf_path).tokenizer_json(), dtype="f32").folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_every_real_weight_equals_its_gguf_blocks(gguf_path: Path, model: Any) -> None:
    state = model.state_dict()
    for tensor in gguf.GGUFReader(gguf_path).tensors:
        name = huggingface_name(tensor.name)
        assert name is not None
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:  # as cpu checks elsewhere undo it: (head, pair, half) to (head, half, pair)
                rows, columns = values.shape
                paired = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
                values = paired.swapaxes(1, 2).reshape(rows, columns)
        assert np.array_equal(state[name].numpy(), values), name
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


TEXTS = (
    "What is the capital of France?",
    "  leading spaces, trailing ones   ",
    "Numbers 1234567890, 3.14 and 2024-01-31.",
    "Ünïcödé, 日本語, русский, 🙂🙃 and\ttabs\r\nnewlines\n\n",
    "<|im_start|>user\nspecial tokens<|im_end|>",
    "def f(x):\n    return x ** 2  # code",
    "",
)


def test_tokens_are_equal(gguf_path: Path, folder: Path) -> None:
    ours, theirs = TextModel.load(gguf_path), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages, add_generation_prompt=True) == rendered


def test_the_converted_model_says_paris(folder: Path, model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
