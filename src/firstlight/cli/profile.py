"""`firstlight profile`: where the time of decode steps goes, measured, beside what `plan` predicts.

The asking is `bench.engine.step_profile`'s. Invariant: where results are to be stored is checked before a
server is started or asked.
"""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.base.errors import FirstlightError, UsageError
from firstlight.cli import plan_values
from firstlight.cli.bench_output import JsonFile, Output, PngFile
from firstlight.cli.locate import say
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.bench.engine.step_prediction import Given, Prediction
    from firstlight.bench.engine.step_profile import Answer

_PLAN = "What plan predicts"


@dataclass
class ProfileOptions:
    """What `profile` takes."""

    url: Annotated[
        str | None, typer.Option(help="A running server of firstlight. Default: http://127.0.0.1:8000.")
    ] = None
    run: Annotated[
        str | None,
        typer.Option(
            metavar="'ARGUMENTS'",
            help="Start `firstlight serve ARGUMENTS` for this, on a free port, and stop it afterwards.",
        ),
    ] = None
    steps: Annotated[
        int, typer.Option(help="Decode steps that are recorded, and about as many between.", min=1, max=2000)
    ] = 64
    load: Annotated[
        int | None,
        typer.Option(
            help="Requests of our own that are open meanwhile. Default: none with --url, 1 with --run.",
            min=0,
            max=1024,
        ),
    ] = None
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of their prompts.", min=1)] = 32
    timeout: Annotated[
        float, typer.Option(help="Seconds; after that, what was recorded by then.", min=0.1, max=300.0)
    ] = 60.0
    api_key: Annotated[
        str | None, typer.Option(help="The server's key. Default: the first in FIRSTLIGHT_API_KEY.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="As `plan` takes it, where the server's own files cannot be read here.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    memory_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of a rank's memory. Default: measured here for a CPU server of this machine, else 1.8TB/s.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    all_reduce_times: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE:US,...",
            help="Microseconds of all-reduces by message size, as 4K:45,64K:344.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    layer_time: Annotated[
        float | None,
        typer.Option(
            metavar="US",
            min=0.0,
            help="Microseconds of a layer beside them. Default: 0 on a CPU, 30 on a GPU.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def profile(options: ProfileOptions) -> None:
    """Measure where the time of a decode step goes on each rank, beside what `plan` predicts.

    The ranks of a running server record some decode steps: matrix products, attention, experts, collectives,
    sampling, drafting, other operators, Python, waiting. Together they are the whole step. Answers stay as
    they are. Collectives include waiting for the other ranks: who waits least there is who is late.

    Exit code 6: no decode step came by (send requests meanwhile, or give --load), or the server has failed.

    Examples:
      firstlight profile --load 1
      firstlight profile --url http://127.0.0.1:8000 --steps 200 --png step.png --json step.json
      firstlight profile --run 'model.gguf --tensor-parallel 2' --load 4
    """
    from firstlight.base import environment
    from firstlight.bench.engine.step_profile import ProfileOrder, profile_server
    from firstlight.bench.engine.step_profile_report import make_report, plot, tables

    if options.url is not None and options.run is not None:
        raise UsageError("--url and --run do not go together.", "Give one of them.")
    output = Output("profile", options.json, options.png)
    with ExitStack() as stack:
        url = options.url or "http://127.0.0.1:8000"
        if options.run is not None:
            url = _started(stack, options.run)
        order = ProfileOrder(
            url=url,
            api_key=options.api_key or next(iter(environment.api_keys()), None),
            num_steps=options.steps,
            timeout_s=options.timeout,
            load=(0 if options.run is None else 1) if options.load is None else options.load,
            prompt_tokens=options.prompt_tokens,
        )
        answer = profile_server(order, say)
    predicted, notes = _predicted(options, answer, url)
    report = make_report(answer.profile, answer.info, predicted, notes)
    output.hand_over(report, *tables(report), plot=plot)


def _started(stack: ExitStack, arguments: str) -> str:
    from firstlight.bench.serving.server_process import ServerProcess

    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"--run {arguments!r} cannot be read: {error}.", "Close its quotes.") from error
    server = stack.enter_context(ServerProcess(words))
    server.wait_until_ready()
    return server.url


def _predicted(options: ProfileOptions, answer: Answer, url: str) -> tuple[Prediction | None, list[str]]:
    """What the plan says, and notes; a model that cannot be read here is a note."""
    from firstlight.bench.engine.step_prediction import predict

    try:
        found = predict(answer.profile, answer.info, _given(options, answer, url))
    except FirstlightError as error:
        return None, [f"nothing is predicted: {error} (--model says which model it is)"]
    return found, [f"plan: {note}" for note in found.notes]


def _given(options: ProfileOptions, answer: Answer, url: str) -> Given:
    from firstlight.base.loopback import is_here
    from firstlight.base.urls import server_address
    from firstlight.bench.engine.step_prediction import Given, is_gpu
    from firstlight.bench.machine.machine_rates import read_bytes_per_s

    rate, points = options.memory_rate, options.all_reduce_times
    is_local = is_here(server_address(url).hostname or "")
    is_measured = rate is None and is_local and not is_gpu(answer.info)
    return Given(
        model=options.model,
        memory_bytes_per_s=None if rate is None else plan_values.rate("--memory-rate", rate),
        local_bytes_per_s=read_bytes_per_s() if is_measured else None,
        layer_s=None if options.layer_time is None else options.layer_time * 1e-6,
        all_reduce=None if points is None else tuple(plan_values.points("--all-reduce-times", points)),
    )
