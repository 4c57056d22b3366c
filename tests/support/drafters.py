"""Tiny drafters and runs of the drafter pipeline over a tiny chat model, made in a second.

Used by the tests of models and of the room drafter. Invariant: the same seed gives the same drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from firstlight.drafter.capture import CaptureSettings, capture
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.prompts import PromptSettings, make_prompts
from firstlight.drafter.target import Target, open_target
from firstlight.facts.description import LatentAttention, RopeScaling
from firstlight.models.eagle3 import DrafterConfig, Eagle3Drafter
from firstlight.models.eagle3_latent import make_drafter
from support.serving import write_chat_model

SMALL_ENGINE = {"threads": 1, "max_num_seqs": 8, "kv_memory_bytes": 2**24, "dtype": "float32"}
LAYERS = (0, 1)
STATES = CaptureSettings(layers=LAYERS, dtype="float32")
# Changes that make a layer's attention latent, as published drafters for Kimi have it.
LATENT: dict[str, Any] = {
    "latent": LatentAttention(query_rank=24, latent_size=16, nope_size=12, rope_size=8, value_size=10),
    "num_kv_heads": 4,
    "head_size": 20,
    "rope_scaling": RopeScaling(kind="yarn", factor=8.0, original_max_position=16),
    "score_scale": 20**-0.5 * 1.5,
}


def drafter_config(**changes: Any) -> DrafterConfig:
    """Sizes of a few thousand parameters."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
        "draft_vocab_size": 20,
        "max_position": 64,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "state_layers": (1, 2, 3),
    }
    return DrafterConfig(**{**sizes, **changes})


def random_drafter(seed: int = 0, **changes: Any) -> Eagle3Drafter:
    """A drafter with random weights, and every third token of the target in its vocabulary."""
    torch.manual_seed(seed)
    config = drafter_config(**changes)
    drafter = make_drafter(config, torch.randn(config.vocab_size, config.hidden_size))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.1)
    ids = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
    drafter.target_ids_R.copy_(ids)
    return drafter


def write_prompt_file(path: Path, num: int) -> Path:
    """Different short questions as JSON lines."""
    rows = [json.dumps({"prompt": f"question {number}: what is {number * 7 % 13}?"}) for number in range(num)]
    path.write_text("\n".join(rows))
    return path


def captured_run(
    folder: Path, num_prompts: int = 12, max_tokens: int = 24, states: CaptureSettings = STATES
) -> tuple[Path, Target]:
    """A run folder with prompts, answers and states of a tiny chat model."""
    target = open_target(write_chat_model(folder / "tiny"))
    out = folder / "run"
    files = (str(write_prompt_file(folder / "questions.jsonl", num_prompts)),)
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=files, held_out_share=0.3)
    make_prompts(out, target, settings, {})
    answers = GenerateSettings(max_tokens=max_tokens, shard_prompts=6)
    generate(out, target, answers, states, SMALL_ENGINE)
    capture(out, target, states, threads=1)
    return out, target
