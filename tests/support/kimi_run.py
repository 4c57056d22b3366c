"""A Kimi in small, and drafters of both kinds that the pipeline taught its answers by heart.

Used by `e2e/test_experts_served`. Experts are packed in four bits, as published. The head is sharp, so that
answers are no toss-up. Invariant: answers were made without drafts, by one rank.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from firstlight.drafter.answers import Answer, read_answers
from firstlight.drafter.capture import CaptureSettings
from firstlight.drafter.export import export
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.prompts import PromptSettings, make_prompts
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target, open_target
from firstlight.drafter.train import train
from firstlight.drafter.train_settings import HEADS, LATENT, Limits, TrainSettings
from firstlight.models.packed_experts import PackedExperts
from firstlight.models.random_model import write_random_model
from firstlight.models.small_kimi import WRAPPER, kimi_of_hidden
from support.drafters import SMALL_ENGINE, write_prompt_file
from support.serving import byte_tokenizer, write_tokenizer

SHARPNESS = 8.0
NUM_PROMPTS, ANSWER_TOKENS = 3, 32
STATES = CaptureSettings(dtype="float32")
TRAINING = TrainSettings(
    draft_vocab_size=200, epochs=60, row_tokens=512, rows_per_step=1, learning_rate=4e-3, warmup_share=0.05,
    step_decay=1.0,
)  # fmt: skip


@dataclass(frozen=True)
class KimiRun:
    """The run folders by the attention of their drafters, and what the target answers."""

    target: Target
    outs: dict[str, Path]
    answers: list[Answer]


def write_kimi(folder: Path) -> Path:
    """A chat model of a few hundred kilobytes."""
    tokenizer = byte_tokenizer()
    description = kimi_of_hidden(
        64, vocab_size=tokenizer.get_vocab_size(), num_layers=3, num_experts=8, end_ids=(2,)
    )
    write_random_model(folder, description, PackedExperts(torch.bfloat16), wrapper=WRAPPER)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["language_model.lm_head.weight"] *= SHARPNESS
    tensors["language_model.lm_head.weight"][:5] = 0.0  # no answer ends early
    save_file(tensors, weights)
    write_tokenizer(folder, tokenizer)
    return folder


def make_kimi_run(folder: Path) -> KimiRun:
    """The stages that both drafters share, and then those of each."""
    target = open_target(write_kimi(folder / "kimi"))
    questions = write_prompt_file(folder / "questions.jsonl", NUM_PROMPTS)
    prompts = PromptSettings(
        num_templates=0, num_gym=0, num_self=0, files=(str(questions),), held_out_share=0.0
    )
    outs = {kind: folder / kind for kind in (HEADS, LATENT)}
    make_prompts(outs[HEADS], target, prompts, {})
    answered = GenerateSettings(max_tokens=ANSWER_TOKENS)
    made = generate(outs[HEADS], target, answered, STATES, SMALL_ENGINE)
    shutil.copytree(outs[HEADS], outs[LATENT])
    for attention, out in outs.items():
        assert read_manifest(out / "capture").files, "states come with the answers"
        train(out, target, replace(TRAINING, attention=attention), Limits())
        export(out, target)
    (name,) = made.manifest.files
    return KimiRun(target, outs, read_answers(outs[HEADS] / "generate", name))
