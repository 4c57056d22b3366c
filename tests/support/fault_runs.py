"""One run of the drafter pipeline on a tiny model, trained until its accuracy tells right from wrong.

Used by the fault-injection suite, which copies it and plants one thing. The target is random, with a sharp
head and linear rotary scaling, so that its answers depend on all states and positions; the drafter learns
its few answers nearly by heart. Invariant: nothing here knows of any fault.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from firstlight.drafter.capture import CaptureSettings, capture
from firstlight.drafter.export import NATIVE, export
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.prompts import PromptSettings, make_prompts
from firstlight.drafter.target import Target, open_target
from firstlight.drafter.train import train
from firstlight.drafter.train_settings import Limits, TrainSettings
from firstlight.facts.description import RopeScaling
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.drafters import SMALL_ENGINE, write_prompt_file
from support.serving import byte_tokenizer, write_tokenizer

LAYERS = (2, 4, 5)
STATES = CaptureSettings(layers=LAYERS, dtype="float32")
NUM_PROMPTS = 10
ANSWER_TOKENS = 40
SHARPNESS = 8.0  # of the target's head: greedy answers that are no toss-up
TRAINING = TrainSettings(
    draft_vocab_size=160,
    epochs=30,
    row_tokens=512,
    rows_per_step=1,
    learning_rate=6e-3,
    warmup_share=0.05,
    step_decay=1.0,
)


@dataclass(frozen=True)
class FaultRun:
    """A whole run in `out`; its drafter in `folder`."""

    out: Path
    target: Target

    @property
    def folder(self) -> Path:
        """What a user would serve."""
        return self.out / "export" / NATIVE

    def copy(self, where: Path) -> FaultRun:
        """The same files elsewhere, to be spoiled."""
        shutil.copytree(self.out, where / "run")
        return FaultRun(where / "run", self.target)


def write_target(folder: Path) -> Path:
    """A random chat model of eight blocks."""
    tokenizer = byte_tokenizer()
    description = tiny_description(
        vocab_size=tokenizer.get_vocab_size(),
        max_position=512,
        eos_token_ids=(2,),
        num_layers=8,
        rope_scaling=RopeScaling(kind="linear", factor=4.0),
    )
    weights = random_weights(description)
    weights["lm_head.weight"] *= SHARPNESS
    weights["lm_head.weight"][:5] = 0.0  # no answer ends early, and none speaks the template's tokens
    write_hf_folder(folder, description, weights)
    write_tokenizer(folder, tokenizer)
    return folder


def make_run(folder: Path) -> FaultRun:
    """All stages, without gates."""
    target = open_target(write_target(folder / "target"))
    out = folder / "run"
    questions = write_prompt_file(folder / "questions.jsonl", NUM_PROMPTS)
    prompts = PromptSettings(
        num_templates=0, num_gym=0, num_self=0, files=(str(questions),), held_out_share=0.0
    )
    make_prompts(out, target, prompts, {})
    generate(out, target, GenerateSettings(max_tokens=ANSWER_TOKENS), STATES, SMALL_ENGINE)
    capture(out, target, STATES, threads=1)
    train(out, target, TRAINING, Limits())
    export(out, target, (NATIVE,))
    return FaultRun(out, target)


def edit_config(folder: Path, **changes: object) -> None:
    """Changes fields of a drafter's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
