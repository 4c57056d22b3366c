"""`firstlight bench collectives`: what a sum over the ranks costs, by size.

Invariant: where results are to be stored is checked before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from firstlight.cli.bench_output import JsonFile, Output, PngFile, progress_bar
from firstlight.cli.options import Debug


@dataclass
class CollectivesOptions:
    """What `bench collectives` takes."""

    ranks: Annotated[int, typer.Option(help="Ranks that sum.", min=2, max=64)] = 2
    device: Annotated[str, typer.Option(help="cpu: shared memory beside gloo. cuda: NCCL.")] = "cpu"
    rounds: Annotated[int, typer.Option(help="Turns that each carrier has at a size.", min=1)] = 5
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def collectives(options: CollectivesOptions) -> None:
    """Measure the engine's all-reduce from 1 KiB to 16 MiB: median, p99, and latency + size / rate.

    The times are also written as `firstlight plan --all-reduce-times` takes them.

    Examples:
      firstlight bench collectives
      firstlight bench collectives --ranks 4 --json collectives.json --png collectives.png
    """
    from firstlight.bench.machine.collectives import CollectivesOrder, bench_collectives, plot, tables

    output = Output("collectives", options.json, options.png)
    order = CollectivesOrder(options.ranks, options.device, options.rounds)
    with progress_bar("sizes") as advance:
        report = bench_collectives(order, advance)
    output.hand_over(report, *tables(report), plot=plot)
