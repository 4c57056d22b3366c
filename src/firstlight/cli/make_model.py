"""`firstlight make-model`: a model of random weights in the shape of a large one.

Invariant: the folder appears whole or not at all, and is served like any other.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.base.errors import UsageError
from firstlight.base.resolve_config import parse_size
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.facts.description import ModelDescription

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
INT4, PLAIN = "int4", "plain"
END_OF_TURN = "<|im_end|>"  # what the published configuration names; the tokenizer's own names [EOS]
# Beside the weights: whatever of these the other model has.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tiktoken.model",
)


@dataclass
class MakeModelOptions:
    """What `make-model` takes."""

    like: Annotated[
        str,
        typer.Argument(metavar="kimi-k2.5", help="The model whose architecture, names and nesting it has."),
    ]
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist.")]
    size: Annotated[str, typer.Option(help="Bytes of weights, at most, such as 20M or 2G.")] = "20M"
    layers: Annotated[int, typer.Option(min=2, help="Layers; the first one is dense.")] = 4
    experts: Annotated[int, typer.Option(min=2, help="Routed experts of each other layer.")] = 16
    dtype: Annotated[str, typer.Option(metavar="bf16|f32", help="Type of the weights.")] = "bf16"
    packing: Annotated[
        str, typer.Option(metavar="int4|plain", help="Of routed experts; int4 is what is published.")
    ] = INT4
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A model whose tokenizer and chat template it gets. Without it: small ones of its own kind.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="The weights are drawn from it.")] = 0
    debug: Debug = False


def make_model(options: MakeModelOptions) -> None:
    """Make a model of random weights in the shape of a large one, to try what the large one needs.

    Tensor names, nesting, packing and configuration are those of the published model.

    Examples:
      firstlight make-model kimi-k2.5 tiny
      firstlight make-model kimi-k2.5 big --size 2G --layers 8 --experts 32
    """
    from firstlight.loading.new_folder import new_folder, require_new

    if options.like != "kimi-k2.5":
        raise UsageError(f"There is no shape {options.like!r}.", "Use kimi-k2.5.")
    if options.dtype not in DTYPES:
        raise UsageError(f"The dtype {options.dtype!r} is unknown.", f"Choose one of: {', '.join(DTYPES)}.")
    if options.packing not in (INT4, PLAIN):
        raise UsageError(f"There is no packing {options.packing!r}.", f"Choose one of: {INT4}, {PLAIN}.")
    require_new(options.target)
    try:
        most_bytes = parse_size(options.size)
    except ValueError as error:
        raise UsageError(f"--size: {error}.", "Write it like 20M or 2G.") from error

    import torch

    from firstlight.drafter.progress import late_meter
    from firstlight.facts.planning.memory_budget import format_bytes
    from firstlight.models.packed_experts import PackedExperts
    from firstlight.models.random_model import Counted, Unpacked, num_bytes, write_random_model
    from firstlight.models.small_kimi import WRAPPER, kimi_of_size
    from firstlight.text.kimi_writer import write_kimi_text

    packing = (PackedExperts if options.packing == INT4 else Unpacked)(getattr(torch, DTYPES[options.dtype]))
    with tempfile.TemporaryDirectory() as own:
        texts = options.tokenizer or Path(own)
        if options.tokenizer is None:
            write_kimi_text(texts)
        description = kimi_of_size(most_bytes, packing, _smallest(options, texts))
        total_bytes = num_bytes(description, packing)
        with (
            new_folder(
                options.target, total_bytes, "the model", "Make room, or give a smaller --size."
            ) as folder,
            late_meter("make-model") as progress,
        ):
            counted = Counted(packing, total_bytes, progress)
            write_random_model(folder, description, counted, seed=options.seed, wrapper=WRAPPER)
            for file in TEXT_FILES:
                if (texts / file).exists():
                    shutil.copy(texts / file, folder / file)
    print(f"{options.target}: hidden size {description.hidden_size}, {format_bytes(total_bytes)}")


def _smallest(options: MakeModelOptions, texts: Path) -> ModelDescription:
    """The narrowest model with these layers and experts, and the vocabulary of the tokenizer."""
    from msgspec.structs import replace

    from firstlight.models.small_kimi import SMALLEST_HIDDEN, kimi_of_hidden
    from firstlight.text.model import TextModel

    text = TextModel.load(texts)
    end = text.token_id(END_OF_TURN) or text.eos_token_id
    description = kimi_of_hidden(
        SMALLEST_HIDDEN,
        vocab_size=text.vocab_size,
        num_layers=options.layers,
        num_experts=options.experts,
        end_ids=() if end is None else (end,),
    )
    return replace(description, bos_token_id=text.bos_token_id)
