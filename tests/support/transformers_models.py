"""Tiny random models made by transformers: a table of configurations, their weights, folders and logits.

Used by the tests of parity. transformers starts norms at 1, biases at 0 and matrices close to 0, so that many
mistakes would stay unseen: here every parameter is random and of a size that matters.
"""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As in Llama 3.x; with 64 original positions, so that a prompt of a test goes beyond them.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# As Qwen's cards have it: max_position_embeddings stays as it was.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN_500K = {"rope_type": "default", "rope_theta": 500000.0}


def _config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return kind(**{**BASE, **changes})


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": _config(LlamaConfig),
    "llama tied": _config(LlamaConfig, tie_word_embeddings=True),
    "llama biased": _config(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama rope theta": _config(LlamaConfig, rope_parameters=PLAIN_500K),
    "llama 3 rope": _config(LlamaConfig, rope_parameters=LLAMA3),
    "llama linear rope": _config(LlamaConfig, rope_parameters=LINEAR),
    "llama 9 heads on 3": _config(
        LlamaConfig, hidden_size=144, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "llama without groups": _config(LlamaConfig, num_key_value_heads=4),
    "llama one kv head": _config(LlamaConfig, num_key_value_heads=1),
    "llama wide heads": _config(LlamaConfig, head_dim=48),
    "llama odd sizes": _config(
        LlamaConfig, hidden_size=90, num_attention_heads=3, num_key_value_heads=3, head_dim=30,
        intermediate_size=77, vocab_size=101,
    ),
    "mistral": _config(MistralConfig, sliding_window=None),
    "mistral window": _config(MistralConfig, sliding_window=24),
    "mistral, some layers with a window": _config(
        MinistralConfig,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2": _config(Qwen2Config),
    "qwen2 yarn": _config(Qwen2Config, max_position_embeddings=64, rope_parameters=YARN),
    "qwen2, a window from layer 1 on": _config(
        Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3, some layers with a window": _config(
        Qwen3Config,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen2 tied": _config(Qwen2Config, tie_word_embeddings=True),
    "qwen3": _config(Qwen3Config, head_dim=32),
    "qwen3 tied": _config(Qwen3Config, head_dim=16, tie_word_embeddings=True),
}  # fmt: skip


# Matrices that are larger, so that attention chooses positions, and tokens their experts.
_CHOOSES = re.compile(r"q_proj|k_proj|q_b_proj|gate\.weight")


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A float32 model in which every parameter is random: matrices keep the variance, norms are near 1."""
    return randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), seed)


def randomise(model: Any, seed: int) -> Any:
    """The model, with new parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                spread = 2.0 if _CHOOSES.search(name) else 1.0
                parameter.copy_(values * spread / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(values * 0.2 + float(name.endswith("norm.weight")))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def save(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A folder without a tokenizer. With another `dtype`, the model's own parameters are rounded to it."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    path = folder / "config.json"
    if (config := json.loads(path.read_text()))["model_type"] == "ministral":
        # Published under the older name, which transformers reads as this one.
        path.write_text(json.dumps(config | {"model_type": "mistral"}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return folder


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int], last: int = 0) -> torch.Tensor:
    """Logits at every position, or at the `last` ones [T, V]."""
    return model(torch.tensor([tokens]), logits_to_keep=last).logits[0]


def random_tokens(num: int, vocabulary: int) -> list[int]:
    """A prompt, always the same."""
    chance = random.Random(1)
    return [chance.randrange(vocabulary) for _ in range(num)]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of all positions, each relative to its largest logit."""
    return float(((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def noise(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The size of the deviations as a share of the size of the logits, over all positions."""
    return float((got - expected).norm() / expected.norm())
