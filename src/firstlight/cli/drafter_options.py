"""Options that the commands of `firstlight drafter` share.

Used by `cli.drafter` and `cli.drafter_results`. Invariant: an option means the same in every command.
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
MAX_MODEL_LEN = 1024


def engine_options(batch: int, threads: int, kernels: str) -> dict[str, Any]:
    """Options of the engine that makes prompts and answers."""
    return {"max_num_seqs": batch, "threads": threads, "cpu_kernels": kernels, "max_model_len": MAX_MODEL_LEN}
