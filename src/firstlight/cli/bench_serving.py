"""`firstlight bench serving`, `path` and `soak`: load on any OpenAI-compatible server, or on one of our own.

Invariant: where results are to be stored is checked before the load begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.bench_output import (
    JsonFile,
    ModelArgument,
    Output,
    PngFile,
    ServerFlags,
    progress_bar,
)
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug


@dataclass
class ServingOptions:
    """What `bench serving` takes."""

    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000"
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: requests open at a time. Default: 8.", min=1)
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second, as a Poisson process.", min=0.001)
    ] = None
    requests: Annotated[int, typer.Option(help="Requests that are measured.", min=1)] = 64
    warmup: Annotated[int, typer.Option(help="Requests before, which are not.", min=0)] = 4
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of a synthetic prompt; words for chat.", min=1)
    ] = 64
    output_tokens: Annotated[int, typer.Option(help="Tokens of every answer.", min=1)] = 128
    shared_prefix: Annotated[
        int, typer.Option(help="First tokens that all synthetic prompts share.", min=0)
    ] = 0
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL file: {"prompt": ...} or {"messages": ...}.', metavar="FILE")
    ] = None
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions"
    model: Annotated[str | None, typer.Option(help="Its name on the server. Default: the first one.")] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    stop_at_end: Annotated[
        bool, typer.Option("--stop-at-end", metavar="", help="Let an end token end an answer early.")
    ] = False
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limit in ms that a good request meets, as ttft:500; repeatable.", metavar="LIMIT"),
    ] = None
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 600.0
    api_key: Annotated[
        str | None, typer.Option(help="The server's key. Default: the first in FIRSTLIGHT_API_KEY.")
    ] = None
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def serving(options: ServingOptions) -> int:
    """Put a server under load and show what its users feel: latencies, throughput, goodput.

    Closed loop (--concurrency) keeps so many requests open; open loop (--rate) sends them whatever happens,
    as users do. Prompts are random, so that a prefix cache does not help unless you ask (--shared-prefix).

    Examples:
      firstlight bench serving --concurrency 32
      firstlight bench serving --rate 4 --requests 200 --goodput ttft:500 --goodput tpot:50
      firstlight bench serving --api chat --prompts prompts.jsonl --json result.json --png result.png
    """
    from firstlight.base import environment
    from firstlight.bench.measures import parse_limits
    from firstlight.bench.serving.prompts import SyntheticPrompts
    from firstlight.bench.serving.serving import ServingOrder, bench_serving
    from firstlight.bench.serving.serving_report import plot, tables

    output = Output("serving", options.json, options.png)
    is_default = options.concurrency is None and options.rate is None
    order = ServingOrder(
        url=options.url,
        api=options.api,
        model=options.model,
        api_key=options.api_key or next(iter(environment.api_keys()), None),
        prompts=SyntheticPrompts(num_tokens=options.prompt_tokens, num_shared=options.shared_prefix),
        file=options.prompts,
        num_requests=options.requests,
        output_tokens=options.output_tokens,
        concurrency=8 if is_default else options.concurrency,
        rate_per_s=options.rate,
        num_warmup=options.warmup,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=not options.stop_at_end,
        timeout_s=options.timeout,
        limits_ms=parse_limits(options.goodput or []),
    )
    with progress_bar("requests") as advance:
        report = bench_serving(order, advance)
    output.hand_over(report, *tables(report), plot=plot)
    return 1 if report.num_errors else 0


@dataclass
class SoakOptions:
    """What `bench soak` takes."""

    model: ModelArgument = None
    minutes: Annotated[float, typer.Option(help="How long traffic lasts.", min=0.05)] = 20.0
    clients: Annotated[int, typer.Option(help="Requests open at a time.", min=1)] = 16
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0
    flag: ServerFlags = None
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def soak(options: SoakOptions) -> int:
    """Run mixed traffic with random aborts against a server of its own, and look at what is left.

    Passes if no request failed, every KV page is free, the log has no traceback and memory stayed flat after
    the first quarter; ends with exit code 1 otherwise.

    Examples:
      firstlight bench soak
      firstlight bench soak model.gguf --minutes 5 --clients 32 --png soak.png
    """
    from firstlight.bench.serving.soak import SoakOrder, bench_soak, plot, table

    output = Output("soak", options.json, options.png)
    order = SoakOrder(
        model=locate(options.model),
        minutes=options.minutes,
        clients=options.clients,
        seed=options.seed,
        flags=tuple(options.flag or ()),
    )
    with progress_bar("seconds") as advance:
        report = bench_soak(order, advance)
    output.hand_over(report, table(report), plot=plot)
    return 1 if report.problems else 0


@dataclass
class PathOptions:
    """What `bench path` takes."""

    model: ModelArgument = None
    concurrency: Annotated[int, typer.Option(help="Chat requests open at a time.", min=1)] = 32
    requests: Annotated[int, typer.Option(help="Requests in all.", min=1)] = 96
    output_tokens: Annotated[int, typer.Option(help="Tokens of every answer.", min=8)] = 128
    profile: Annotated[
        bool, typer.Option("--profile", metavar="", help="Also where the api process spends its time.")
    ] = False
    flag: ServerFlags = None
    json: JsonFile = None
    debug: Debug = False


def path(options: PathOptions) -> int:
    """Measure what tokenising, HTTP and scheduling take from the cores that run the model.

    Starts a server, keeps so many chat requests open and sets the processor time beside the model against a
    full decode step. Ends with exit code 1 where it is more than a tenth.

    Examples:
      firstlight bench path
      firstlight bench path --concurrency 8 --profile --json path.json
    """
    from firstlight.bench.serving.path import PathOrder, bench_path, tables

    output = Output("path", options.json)
    order = PathOrder(
        model=locate(options.model),
        concurrency=options.concurrency,
        requests=options.requests,
        output_tokens=options.output_tokens,
        flags=tuple(options.flag or ()),
        with_profile=options.profile,
    )
    with progress_bar("requests") as advance:
        report = bench_path(order, advance)
    output.hand_over(report, *tables(report))
    return 0 if report.meets_goal else 1
