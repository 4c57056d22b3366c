"""Options that the commands of `firstlight drafter` share.

Invariant: an option means the same in every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[
    Path, typer.Option(help="Folder of the whole run; each stage has its own in it.", metavar="DIR")
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", help="The model that will be served. Default: the embedded one.", metavar="MODEL"
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences that the engine runs together.", min=1)]
Threads = Annotated[int, typer.Option(help="Operator threads. 0: the usable cores.", min=0)]
Kernels = Annotated[str, typer.Option(help="auto: our own; stock: those of PyTorch.")]
Layers = Annotated[
    list[int] | None,
    typer.Option(help="Blocks that have run when a state is taken; repeatable. Default: 2, L/2, L-3."),
]
Storage = Annotated[
    str, typer.Option(help="Of the states: bfloat16; or int8, nearly half as large, with its error told.")
]
Attention = Annotated[
    str,
    typer.Option(help="Of the drafter: heads, which every engine runs; or latent, where its target's is."),
]
Templates = Annotated[int, typer.Option(help="Prompts of the built-in families.", min=0)]
Gym = Annotated[int, typer.Option(help="Prompts of reasoning-gym, where it is installed.", min=0)]
SelfMade = Annotated[int, typer.Option("--self", help="Tries to let the target make a prompt itself.", min=0)]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(help="JSON lines of prompts, OpenAI messages or ShareGPT; repeatable.", metavar="FILE"),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)]
MaxPromptTokens = Annotated[
    int,
    typer.Option(help="Most tokens of a prompt; longer ones are left out. 0: the model's own length.", min=0),
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Leave out records of --file that are not understood, and count them."),
]
DraftVocabulary = Annotated[int, typer.Option(help="Tokens that the drafter can say.", min=1)]
Epochs = Annotated[int, typer.Option(help="Times that every answer is seen.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Its highest value.", min=0)]
MaxMinutes = Annotated[
    float, typer.Option(help="End after so many minutes of training, the rate falling in time.", min=0)
]
Loss = Annotated[str, typer.Option(help="cross-entropy, lk-alpha or lk-lambda.")]
InitFrom = Annotated[
    Path | None, typer.Option(help="Start from the drafter in this folder.", metavar="FOLDER")
]
TrainDtype = Annotated[str, typer.Option("--dtype", help="Of products: float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
MAX_MODEL_LEN = 1024


def engine_options(batch: int, threads: int, kernels: str) -> dict[str, Any]:
    """Options of the engine that makes prompts and answers."""
    return {"max_num_seqs": batch, "threads": threads, "cpu_kernels": kernels, "max_model_len": MAX_MODEL_LEN}
