"""`firstlight bench speculation`: each drafter beside none, on the same answers.

Invariant: where results are to be stored is checked before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.bench_output import JsonFile, ModelArgument, Output, progress_bar
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug


@dataclass
class SpeculationOptions:
    """What `bench speculation` takes."""

    model: ModelArgument = None
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="As of `serve`; repeatable. Default: ngram, and the one that comes with the model.",
            metavar="DRAFTER",
        ),
    ] = None
    draft_tokens: Annotated[
        list[int] | None, typer.Option(help="Most drafts of a step (k); repeatable. Default: 3.", min=1)
    ] = None
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="A tree beside the chains: depth, top-k and nodes (EAGLE-3); repeatable.", metavar="3x4x16"
        ),
    ] = None
    draft_adapt: Annotated[
        bool, typer.Option("--draft-adapt/--no-draft-adapt", help="As many drafts as pay, or always k.")
    ] = True
    beside: Annotated[
        list[str] | None,
        typer.Option(help="An OpenAI-compatible server that answers, too; repeatable.", metavar="URL"),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="A file of prompts, a group of its own; repeatable.", metavar="FILE"),
    ] = None
    prompts_each: Annotated[int, typer.Option(help="Prompts of each group.", min=1)] = 8
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=16)] = 128
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences that decode together; repeatable.", min=1)
    ] = None
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.", min=1)] = 7
    threads: Annotated[int, typer.Option(help="Operator threads. 0: the usable cores.", min=0)] = 0
    cpu_kernels: Annotated[str, typer.Option(help="auto, native or stock.")] = "auto"
    json: JsonFile = None
    debug: Debug = False


def speculation(options: SpeculationOptions) -> None:
    """Decode the same answers with each drafter and without, in turns, and compare.

    Says speed, acceptance (with its k) and whether the answers are the same tokens. Loops, which are easy to
    guess, are cut off. Without --prompts: two families of prompts that no drafter of ours was trained on.

    Examples:
      firstlight bench speculation
      firstlight bench speculation --drafter ngram --drafter my-drafter/export/native --json drafts.json
      firstlight bench speculation --batch 1 --beside http://127.0.0.1:8080
      firstlight bench speculation --no-draft-adapt --draft-tokens 1 --draft-tokens 3 --batch 1
      firstlight bench speculation --no-draft-adapt --tree 3x4x16 --batch 1
    """
    from firstlight.bench.engine.speculation import SpeculationOrder, bench_speculation, table
    from firstlight.bench.engine.speculation_subjects import parse_tree

    output = Output("speculation", options.json)
    order = SpeculationOrder(
        model=locate(options.model),
        drafters=tuple(options.drafter or ()),
        draft_tokens=tuple(options.draft_tokens or SpeculationOrder.draft_tokens),
        trees=tuple(parse_tree(text) for text in options.tree or ()),
        adapt=options.draft_adapt,
        beside=tuple(options.beside or ()),
        files=tuple(options.prompts or ()),
        prompts_each=options.prompts_each,
        answer_tokens=options.tokens,
        batches=tuple(options.batch or SpeculationOrder.batches),
        rounds=options.rounds,
        threads=options.threads,
        cpu_kernels=options.cpu_kernels,
    )
    with progress_bar("rounds") as advance:
        report = bench_speculation(order, advance)
    output.hand_over(report, table(report))
