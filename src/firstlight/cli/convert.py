"""`firstlight convert`: a GGUF file becomes a Hugging Face folder.

Brings together `text` (the tokenizer) and `loading` (the weights), which do not know each other. Invariant:
the folder appears whole or not at all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.base.errors import UsageError
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = "default"  # names the embedded default model


@dataclass
class ConvertOptions:
    """What `convert` takes."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="GGUF",
            help="A GGUF file, one on the hub (org/name/file.gguf), or the word default: the default model.",
        ),
    ]
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist.")]
    dtype: Annotated[
        str,
        typer.Option(
            metavar="bf16|f16|f32", help="Type of the weights. f32 keeps every value, the others round."
        ),
    ] = "bf16"
    debug: Debug = False


def convert(options: ConvertOptions) -> None:
    """Turn a GGUF file into a Hugging Face folder that transformers and vLLM load.

    Writes config.json, the tokenizer with its chat template, and the weights as safetensors.

    Examples:
      firstlight convert model.gguf folder
      firstlight convert default smollm2 --dtype f32
    """
    from firstlight.facts.checkpoint.checkpoint import open_checkpoint
    from firstlight.facts.planning.memory_budget import format_bytes
    from firstlight.loading.new_folder import require_new
    from firstlight.text.model import TextModel

    require_new(options.target)  # before a download, and before torch is loaded
    asked = None if options.source == DEFAULT and not Path(DEFAULT).exists() else options.source
    path = locate(asked)
    if path.is_dir():
        raise UsageError(f"{path} is a folder already; only GGUF files are converted.", "Give a GGUF file.")
    open_checkpoint(path)  # before the tokenizer: what is no model is called that
    tokenizer_json = TextModel.load(path).tokenizer_json()

    from firstlight.loading.convert import convert_gguf  # loads torch

    report = convert_gguf(path, options.target, tokenizer_json, dtype=options.dtype, progress=_progress())
    print(f"{report.folder}: {report.num_tensors} tensors, {format_bytes(report.weight_bytes)}")
    for name in report.files:
        print(f"  {name}")


def _progress() -> Callable[[int, int], None] | None:
    """A live line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r  {done / 1e6:.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)

    return show
