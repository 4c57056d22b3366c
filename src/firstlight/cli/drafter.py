"""`firstlight drafter`: the group of commands that make an EAGLE-3 drafter, stage by stage.

Every stage keeps its files in a folder of its own below --out, and goes on from what is finished there.
Invariant: `firstlight --help` loads none of the room `drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from firstlight.cli.drafter_explain import explain
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
from firstlight.cli.drafter_results import check, evaluate, export, probe
from firstlight.cli.drafter_run import run
from firstlight.cli.locate import locate, say
from firstlight.cli.options import Debug, add_command

drafter_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train an EAGLE-3 drafter for a model: prompts, answers, hidden states, training, evaluation.",
)


@dataclass
class PromptsOptions:
    """What `drafter prompts` takes."""

    out: Out
    target: TargetOption = None
    templates: Templates = 2400
    gym: Gym = 1000
    self_made: SelfMade = 2000
    file: PromptFiles = None
    skip_bad: SkipBad = False
    seed: Annotated[int, typer.Option(help="Seed of all that is random here.")] = 0
    batch: Batch = 32
    threads: Threads = 0
    cpu_kernels: Kernels = "auto"
    debug: Debug = False


def prompts(options: PromptsOptions) -> None:
    """Gather the prompts: built-in families, prompts of the target's own, and files of yours.

    Examples:
      firstlight drafter prompts --out my-drafter
      firstlight drafter prompts --out my-drafter --file chats.jsonl --self 0
    """
    from firstlight.drafter.prompts import PromptSettings, make_prompts
    from firstlight.drafter.target import open_target

    settings = PromptSettings(
        num_templates=options.templates,
        num_gym=options.gym,
        num_self=options.self_made,
        files=tuple(str(path) for path in options.file or ()),
        skip_bad=options.skip_bad,
        seed=options.seed,
    )
    engine = engine_options(options.batch, options.threads, options.cpu_kernels)
    stage = make_prompts(options.out, open_target(locate(options.target)), settings, engine)
    print(f"{stage.manifest.numbers['prompts']} prompts in {stage.folder}")


@dataclass
class GenerateOptions:
    """What `drafter generate` takes."""

    out: Out
    target: TargetOption = None
    max_tokens: MaxTokens = 256
    max_prompt_tokens: MaxPromptTokens = 0
    temperature: Annotated[float, typer.Option(help="0: what the target would choose.", min=0)] = 0.0
    top_p: Annotated[float, typer.Option(help="Of sampled answers.", min=0, max=1)] = 1.0
    url: Annotated[
        str, typer.Option(help="Let a server answer that returns token ids; states come by capture.")
    ] = ""
    layer: Layers = None
    storage: Storage = "bfloat16"
    shard_prompts: Annotated[int, typer.Option(help="Prompts of a shard, the unit of resuming.", min=1)] = 256
    max_shards: Annotated[
        int | None, typer.Option(help="Stop after so many more shards.", min=1, metavar="N")
    ] = None
    batch: Batch = 32
    threads: Threads = 0
    cpu_kernels: Kernels = "auto"
    debug: Debug = False


def generate(options: GenerateOptions) -> None:
    """Let the target answer the prompts, batched; keeps token ids, and the hidden states beside them.

    Examples:
      firstlight drafter generate --out my-drafter
      firstlight drafter generate --out my-drafter --max-shards 4
    """
    from firstlight.drafter.capture import CaptureSettings
    from firstlight.drafter.generate import GenerateSettings
    from firstlight.drafter.generate import generate as run_stage
    from firstlight.drafter.target import open_target

    settings = GenerateSettings(
        max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        url=options.url,
        shard_prompts=options.shard_prompts,
    )
    states = CaptureSettings(
        layers=tuple(options.layer or ()), cpu_kernels=options.cpu_kernels, storage=options.storage
    )
    engine = engine_options(options.batch, options.threads, options.cpu_kernels)
    target = open_target(locate(options.target))
    stage = run_stage(options.out, target, settings, states, engine, options.max_shards)
    numbers = stage.manifest.numbers
    print(f"{numbers['answers']} answers with {numbers['answer_tokens']} tokens in {stage.folder}")


@dataclass
class CaptureOptions:
    """What `drafter capture` takes."""

    out: Out
    target: TargetOption = None
    layer: Layers = None
    max_shards: Annotated[
        int | None, typer.Option(help="Stop after so many more shards.", min=1, metavar="N")
    ] = None
    dtype: Annotated[str, typer.Option(help="auto or float32.")] = "auto"
    storage: Storage = "bfloat16"
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure the same steps without states, too.")
    ] = False
    threads: Threads = 0
    cpu_kernels: Kernels = "auto"
    debug: Debug = False


def capture(options: CaptureOptions) -> None:
    """Store the target's hidden states for every answer, through the kernels that serve.

    Takes what generate has finished so far; run it again when there is more.

    Examples:
      firstlight drafter capture --out my-drafter
      firstlight drafter capture --out my-drafter --layer 2 --layer 15 --layer 27
    """
    from firstlight.drafter.capture import CaptureSettings
    from firstlight.drafter.capture import capture as run_stage
    from firstlight.drafter.capture_cost import measure_capture
    from firstlight.drafter.target import open_target

    settings = CaptureSettings(
        layers=tuple(options.layer or ()),
        dtype=options.dtype,
        cpu_kernels=options.cpu_kernels,
        storage=options.storage,
    )
    target = open_target(locate(options.target))
    stage = run_stage(options.out, target, settings, options.threads, options.max_shards)
    numbers = stage.manifest.numbers
    if options.compare:
        found = measure_capture(options.out, target, settings, options.threads)
        print(
            f"{found['capture_tokens_per_s']} tokens/s with states, {found['prefill_tokens_per_s']} without: "
            f"{found['share_of_prefill']} of plain prefill"
        )
    if "storage_error" in numbers:
        print(f"int8 storage: {numbers['storage_error']}")
    num_shards = len(stage.manifest.files)
    print(f"{numbers.get('supervised', 0)} supervised tokens in {num_shards} shards in {stage.folder}")


@dataclass
class TrainOptions:
    """What `drafter train` takes."""

    out: Out
    target: TargetOption = None
    draft_vocabulary: DraftVocabulary = 8192
    unroll: Annotated[int, typer.Option(help="Drafts that training unrolls.", min=1)] = 3
    epochs: Epochs = 4
    learning_rate: LearningRate = 1e-3
    rows_per_step: Annotated[int, typer.Option(help="Packed rows of an optimiser step.", min=1)] = 2
    row_tokens: Annotated[int, typer.Option(help="Tokens of a packed row.", min=16)] = 512
    warmup_share: Annotated[
        float, typer.Option(help="Share of training until the highest learning rate.", min=0, max=1)
    ] = 0.04
    max_minutes: MaxMinutes = 0.0
    attention: Attention = "heads"
    loss: Loss = "cross-entropy"
    init_from: InitFrom = None
    dtype: TrainDtype = "float32"
    device: Device = "cpu"
    ranks: Annotated[int, typer.Option(help="Processes that share the rows of a step.", min=1)] = 1
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files, too.")] = False
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after so many more optimiser steps.", min=1, metavar="N")
    ] = None
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 300.0
    threads: Threads = 0
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0
    debug: Debug = False


def train(options: TrainOptions) -> None:
    """Train the drafter; goes on from the last checkpoint, and shows loss and accuracy of held-out prompts.

    Examples:
      firstlight drafter train --out my-drafter
      firstlight drafter train --out my-drafter --unroll 4 --epochs 6
    """
    import torch

    from firstlight.drafter.target import open_target
    from firstlight.drafter.train import train as run_stage
    from firstlight.drafter.train_settings import Limits, TrainSettings

    if options.threads:
        torch.set_num_threads(options.threads)
    settings = TrainSettings(
        draft_vocab_size=options.draft_vocabulary,
        num_steps=options.unroll,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        rows_per_step=options.rows_per_step,
        row_tokens=options.row_tokens,
        warmup_share=options.warmup_share,
        max_minutes=options.max_minutes,
        loss=options.loss,
        init_from=str(options.init_from or ""),
        dtype=options.dtype,
        attention=options.attention,
        seed=options.seed,
    )
    limits = Limits(
        max_optimizer_steps=options.max_steps,
        checkpoint_every_s=options.checkpoint_every,
        device=options.device,
        num_ranks=options.ranks,
        tensorboard=options.tensorboard,
        say=say,
    )
    stage = run_stage(options.out, open_target(locate(options.target)), settings, limits)
    print(f"step {stage.manifest.numbers['step']} in {stage.folder}")


add_command(drafter_app, prompts)
add_command(drafter_app, generate)
add_command(drafter_app, capture)
add_command(drafter_app, check)
add_command(drafter_app, train)
add_command(drafter_app, evaluate)
add_command(drafter_app, export)
add_command(drafter_app, probe)
add_command(drafter_app, explain)
add_command(drafter_app, run)
