"""`firstlight drafter explain`: why a drafter is good or bad, and who has to act.

Invariant: the verdict goes to standard output, progress to standard error, and the exit code says the
verdict.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.drafter_options import Kernels, SkipBad, TargetOption, Threads
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.drafter.explain.evidence import Served
    from firstlight.drafter.prompt_files import Conversation


@dataclass
class ExplainOptions:
    """What `drafter explain` takes."""

    folder: Annotated[Path, typer.Argument(help="The drafter's folder, of any dialect.", metavar="DRAFTER")]
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run that made it: its data.", metavar="DIR")
    ] = None
    target: TargetOption = None
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts, where there is no run folder; repeatable.", metavar="FILE"),
    ] = None
    skip_bad: SkipBad = False
    document_tokens: Annotated[
        int, typer.Option(help="Most tokens of a prompt with its answer that are looked at.", min=16)
    ] = 384
    drafts: Annotated[int, typer.Option(help="Drafts of a step: k.", min=1)] = 3
    served_acceptance: Annotated[
        float | None, typer.Option(help="Acceptance length that a server reached at this k.", min=1)
    ] = None
    url: Annotated[str | None, typer.Option(help="A server whose /metrics say it.", metavar="URL")] = None
    tensor_parallel: Annotated[int, typer.Option(help="Compare the states of so many ranks, too.", min=1)] = 1
    documents: Annotated[int, typer.Option(help="Most answers that are measured with.", min=1)] = 8
    json: Annotated[
        Path | None, typer.Option(help="Store verdict and numbers; - is standard output.", metavar="FILE")
    ] = None
    threads: Threads = 0
    cpu_kernels: Kernels = "auto"
    debug: Debug = False


def explain(options: ExplainOptions) -> int:
    """Say why a drafter is good or bad: training, data, template, integration (which), or fine.

    Compares accuracy on the reference's states, the engine's states in prefill, decode and verification, its
    drafts, weights, layer ids, norm flags and template tokens. Exit code: 0 fine, 20 training, 21 data, 22
    template, 23 integration, 24 not measured (the engine could not be asked).

    Examples:
      firstlight drafter explain my-drafter/export/native --out my-drafter
      firstlight drafter explain my-drafter/export/native --out my-drafter --served-acceptance 1.32
    """
    from firstlight.base.errors import UsageError
    from firstlight.drafter.explain.collect import collect
    from firstlight.drafter.explain.judge import judge
    from firstlight.drafter.explain.order import Order
    from firstlight.drafter.explain.report import as_json, as_text
    from firstlight.drafter.target import open_target

    if not options.folder.is_dir():
        raise UsageError(f"{options.folder} is no folder.", "Give the folder of a drafter.")
    served = _served(options)
    prompts = _prompts(options)
    order = Order(
        target=open_target(locate(options.target)),
        drafter=options.folder,
        out=options.out,
        prompts=tuple(prompts),
        k=options.drafts,
        max_documents=options.documents,
        max_tokens=options.document_tokens,
        num_ranks=options.tensor_parallel,
        threads=options.threads,
        cpu_kernels=options.cpu_kernels,
        served=served,
    )
    evidence = collect(order)
    verdict = judge(evidence)
    if options.json is not None and str(options.json) != "-":
        from firstlight.base.files import replacing

        with replacing(options.json) as file:
            file.write(as_json(evidence, verdict))
    if options.json is not None and str(options.json) == "-":
        sys.stdout.write(as_json(evidence, verdict).decode())
    else:
        print(as_text(evidence, verdict))
    return verdict.exit_code


def _prompts(options: ExplainOptions) -> list[Conversation]:
    """Of all files; with --skip-bad what is left out is said."""
    from firstlight.base.errors import FirstlightError
    from firstlight.drafter.prompt_files import read_prompt_file
    from firstlight.drafter.prompts import say_skipped

    found = []
    for path in options.file or ():
        bad: list[FirstlightError] = []
        found += read_prompt_file(path, bad.append if options.skip_bad else None)
        if bad:
            say_skipped("explain", path, bad)
    return found


def _served(options: ExplainOptions) -> Served | None:
    from firstlight.base.errors import UsageError
    from firstlight.drafter.explain.evidence import Served
    from firstlight.drafter.explain.served import ask_server

    if options.url is not None and options.served_acceptance is not None:
        raise UsageError("--url and --served-acceptance say the same.", "Give one of them.")
    if options.url is not None:
        return ask_server(options.url, options.drafts)
    if options.served_acceptance is None:
        return None
    length = options.served_acceptance
    if length > options.drafts + 1:
        raise UsageError(
            f"--served-acceptance {length} is above k + 1 = {options.drafts + 1}.",
            "Give the k of that server as --drafts.",
        )
    return Served(acceptance_length=length, k=options.drafts, source="as given")
