"""`firstlight drafter run`: all stages in one command.

Invariant: an option of a stage means here what it means there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from firstlight.cli.drafter_options import (
    Attention,
    Batch,
    Device,
    DraftVocabulary,
    Epochs,
    Gym,
    InitFrom,
    Kernels,
    Layers,
    LearningRate,
    Loss,
    MaxMinutes,
    MaxPromptTokens,
    MaxTokens,
    Out,
    PromptFiles,
    SelfMade,
    SkipBad,
    Storage,
    TargetOption,
    Templates,
    Threads,
    TrainDtype,
    engine_options,
)
from firstlight.cli.drafter_results import table, teacher_forced
from firstlight.cli.locate import locate, say
from firstlight.cli.options import Debug


@dataclass
class RunOptions:
    """What `drafter run` takes; the stages' own commands have the rest."""

    out: Out
    target: TargetOption = None
    templates: Templates = 2400
    gym: Gym = 1000
    self_made: SelfMade = 2000
    file: PromptFiles = None
    skip_bad: SkipBad = False
    max_tokens: MaxTokens = 256
    max_prompt_tokens: MaxPromptTokens = 0
    layer: Layers = None
    storage: Storage = "bfloat16"
    draft_vocabulary: DraftVocabulary = 8192
    epochs: Epochs = 4
    learning_rate: LearningRate = 1e-3
    max_minutes: MaxMinutes = 0.0
    loss: Loss = "cross-entropy"
    init_from: InitFrom = None
    dtype: TrainDtype = "float32"
    device: Device = "cpu"
    attention: Attention = "heads"
    batch: Batch = 32
    force: Annotated[
        bool, typer.Option("--force", help="Go on behind closed gates; manifest and card say so.")
    ] = False
    threads: Threads = 0
    cpu_kernels: Kernels = "auto"
    seed: Annotated[int, typer.Option(help="Seed of prompts, weights and order.")] = 0
    debug: Debug = False


def run(options: RunOptions) -> None:
    """Make a drafter from nothing: all stages, each behind its gates. Start it again to go on after a kill.

    Examples:
      firstlight drafter run --out my-drafter
      firstlight drafter run --target model.gguf --out my-drafter --file chats.jsonl
      firstlight drafter run --out my-drafter --init-from old-drafter --max-minutes 60 --dtype bfloat16
    """
    from firstlight.cli.bench_output import show
    from firstlight.drafter.capture import CaptureSettings
    from firstlight.drafter.generate import GenerateSettings
    from firstlight.drafter.prompts import PromptSettings
    from firstlight.drafter.run import RunOrder
    from firstlight.drafter.run import run as run_all
    from firstlight.drafter.target import open_target
    from firstlight.drafter.train_settings import TrainSettings

    order = RunOrder(
        prompts=PromptSettings(
            num_templates=options.templates,
            num_gym=options.gym,
            num_self=options.self_made,
            files=tuple(str(path) for path in options.file or ()),
            skip_bad=options.skip_bad,
            seed=options.seed,
        ),
        generate=GenerateSettings(max_tokens=options.max_tokens, max_prompt_tokens=options.max_prompt_tokens),
        capture=CaptureSettings(
            layers=tuple(options.layer or ()), cpu_kernels=options.cpu_kernels, storage=options.storage
        ),
        train=TrainSettings(
            draft_vocab_size=options.draft_vocabulary,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            max_minutes=options.max_minutes,
            loss=options.loss,
            init_from=str(options.init_from or ""),
            dtype=options.dtype,
            attention=options.attention,
            seed=options.seed,
        ),
        engine=engine_options(options.batch, options.threads, options.cpu_kernels),
        threads=options.threads,
        device=options.device,
        force=options.force,
    )

    report = run_all(options.out, open_target(locate(options.target)), order, say)
    show(table(report), teacher_forced(report))
