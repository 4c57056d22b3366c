"""`firstlight bench offline`, `operators`, `startup`, `quality`, `scheduler`, `blackbox`: inside an engine.

Invariant: where results are to be stored is checked before anything is loaded.
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

KvDtype = Annotated[str, typer.Option(help="How KV is kept: auto, float16, bfloat16 or int8.")]
Threads = Annotated[int, typer.Option(help="Operator threads. 0: the usable cores.", min=0)]


@dataclass
class OfflineOptions:
    """What `bench offline` takes."""

    model: ModelArgument = None
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences that decode together; repeatable.", min=1)
    ] = None
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeatable.", min=1)] = None
    steps: Annotated[int, typer.Option(help="Decode steps that are measured.", min=1)] = 32
    rounds: Annotated[int, typer.Option(help="Prompts that are measured at each length.", min=1)] = 5
    dtype: Annotated[str, typer.Option(help="auto or float32.")] = "auto"
    threads: Threads = 0
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def offline(options: OfflineOptions) -> None:
    """Sweep prefill and decode of the engine in this process, without HTTP.

    Says which share of this machine's memory bandwidth and matrix rate it reaches; both are measured on the
    spot, before and after.

    Examples:
      firstlight bench offline
      firstlight bench offline model.gguf --batch 1 --batch 8 --length 128 --json sweep.json
    """
    from firstlight.bench.engine.offline import OfflineOrder, bench_offline, plot, tables

    output = Output("offline", options.json, options.png)
    order = OfflineOrder(
        model=locate(options.model),
        dtype=options.dtype,
        threads=options.threads,
        batches=tuple(options.batch or OfflineOrder.batches),
        lengths=tuple(options.length or OfflineOrder.lengths),
        decode_steps=options.steps,
        rounds=options.rounds,
    )
    with progress_bar("points") as advance:
        report = bench_offline(order, advance)
    output.hand_over(report, *tables(report), plot=plot)


@dataclass
class OperatorsOptions:
    """What `bench operators` takes."""

    model: ModelArgument = None
    rows: Annotated[list[int] | None, typer.Option(help="Sequences of a step; repeatable.", min=1)] = None
    history: Annotated[int, typer.Option(help="Tokens that each of them has.", min=1)] = 256
    rounds: Annotated[int, typer.Option(help="Runs of each operator; the fastest counts.", min=1)] = 7
    kv_dtype: KvDtype = "auto"
    threads: Threads = 0
    json: JsonFile = None
    debug: Debug = False


def operators(options: OperatorsOptions) -> None:
    """Measure each of our own CPU operators over a model's shapes: GB/s and Gop/s beside the limits here.

    Also what a recorded step of several rows costs beside a step of one.

    Examples:
      firstlight bench operators
      firstlight bench operators model.gguf --rows 1 --rows 4 --history 2000 --json operators.json
    """
    from firstlight.bench.machine.operators import OperatorsOrder, bench_operators, tables

    output = Output("operators", options.json)
    order = OperatorsOrder(
        model=locate(options.model),
        threads=options.threads,
        rows=tuple(options.rows or OperatorsOrder.rows),
        history=options.history,
        rounds=options.rounds,
        kv_dtype=options.kv_dtype,
    )
    with progress_bar("rows") as advance:
        report = bench_operators(order, advance)
    output.hand_over(report, *tables(report))


@dataclass
class StartupOptions:
    """What `bench startup` takes."""

    model: ModelArgument = None
    runs: Annotated[int, typer.Option(help="Launches; the median counts.", min=1)] = 5
    cold: Annotated[
        bool, typer.Option("--cold", metavar="", help="Drop the model from the page cache before each.")
    ] = False
    flag: ServerFlags = None
    json: JsonFile = None
    png: PngFile = None
    debug: Debug = False


def startup(options: StartupOptions) -> None:
    """Launch the server several times: seconds to the port, to ready and to the first token, by phase.

    Examples:
      firstlight bench startup
      firstlight bench startup model.gguf --runs 3 --cold --json start.json
    """
    from firstlight.bench.serving.startup import bench_startup, plot, table

    output = Output("startup", options.json, options.png)
    model = locate(options.model)
    with progress_bar("launches") as advance:
        report = bench_startup(model, options.flag or [], options.runs, cold=options.cold, on_run=advance)
    output.hand_over(report, table(report), plot=plot)


@dataclass
class QualityOptions:
    """What `bench quality` takes."""

    model: ModelArgument = None
    texts: Annotated[
        Path | None,
        typer.Option(help="Your own texts, with lines of ---- between them. Default: ours.", metavar="FILE"),
    ] = None
    goal: Annotated[float, typer.Option(help="Mean KL a token that is still good.", min=0)] = 2e-3
    full: Annotated[
        bool,
        typer.Option("--full", metavar="", help="Also 100 kB of text and the answers to fifty questions."),
    ] = False
    long_text: Annotated[
        Path | None,
        typer.Option(help="A long text of yours, for --full. Default: Python's manual.", metavar="FILE"),
    ] = None
    cpu_kernels: Annotated[str, typer.Option(help="auto: our own; stock: those of PyTorch.")] = "stock"
    kv_dtype: KvDtype = "auto"
    threads: Threads = 0
    json: JsonFile = None
    debug: Debug = False


def quality(options: QualityOptions) -> int:
    """Compare the fast layouts of weights and KV with float32: KL a token on twenty real texts.

    Measured with 1 and 8 positions in a step and with whole texts, as the layout depends on their number.
    With --full also the perplexity of a long text, within 0.5 %, and what differs in greedy answers.
    Ends with exit code 1 where the mean is above the goal, or the perplexity too far off.

    Examples:
      firstlight bench quality
      firstlight bench quality --full --cpu-kernels auto --kv-dtype int8
      firstlight bench quality model.gguf --goal 0.001 --json quality.json
    """
    from firstlight.bench.engine.quality import QualityOrder, bench_quality, details, read_texts, table
    from firstlight.bench.engine.quality_full import read_long_text, read_questions

    output = Output("quality", options.json)
    order = QualityOrder(
        model=locate(options.model),
        texts=read_texts(options.texts),
        threads=options.threads,
        goal=options.goal,
        cpu_kernels=options.cpu_kernels,
        kv_dtype=options.kv_dtype,
        long_text=read_long_text(options.long_text) if options.full else None,
        questions=tuple(read_questions()) if options.full else (),
    )
    with progress_bar("texts") as advance:
        report = bench_quality(order, advance)
    kept = f"keys and values in {' and '.join(dict.fromkeys(report.kv_dtypes))}"
    shown = filter(None, [details(report), "\n".join(["layouts:", *report.layouts, kept])])
    output.hand_over(report, table(report), *shown)
    return 0 if report.meets_goal else 1


@dataclass
class SchedulerOptions:
    """What `bench scheduler` takes."""

    running: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 256
    waiting: Annotated[list[int] | None, typer.Option(help="Requests in the queue; repeatable.", min=0)] = (
        None
    )
    steps: Annotated[int, typer.Option(help="Steps that are measured.", min=1)] = 400
    json: JsonFile = None
    debug: Debug = False


def scheduler(options: SchedulerOptions) -> int:
    """Measure the Python time of the scheduler in a step, with 0, 1,000 and 10,000 requests waiting.

    Ends with exit code 1 where the median is a millisecond or more.

    Examples:
      firstlight bench scheduler
      firstlight bench scheduler --running 64 --waiting 100000
    """
    from firstlight.bench.engine.scheduler import bench_scheduler, table

    output = Output("scheduler", options.json)
    queues = options.waiting or [0, 1_000, 10_000]
    report = bench_scheduler(options.running, queues, options.steps)
    output.hand_over(report, table(report))
    return 0 if report.meets_goal else 1


@dataclass
class BlackBoxOptions:
    """What `bench blackbox` takes."""

    model: ModelArgument = None
    writes: Annotated[int, typer.Option(help="Writes of each kind in a repeat.", min=1)] = 100_000
    rounds: Annotated[int, typer.Option(help="Rounds with a box and without.", min=1)] = 12
    batch: Annotated[int, typer.Option(help="Requests of a round.", min=1)] = 8
    tokens: Annotated[int, typer.Option(help="Tokens of each request.", min=1)] = 32
    threads: Threads = 0
    json: JsonFile = None
    debug: Debug = False


def blackbox(options: BlackBoxOptions) -> int:
    """Measure what the black box costs: nanoseconds a write, and the engine's throughput with and without.

    Ends with exit code 1 where an event, a counter or a collective takes more than a microsecond.

    Examples:
      firstlight bench blackbox
      firstlight bench blackbox model.gguf --rounds 40 --json blackbox.json
    """
    from firstlight.bench.engine.blackbox import BlackBoxOrder, bench_blackbox, tables

    output = Output("blackbox", options.json)
    order = BlackBoxOrder(
        model=locate(options.model),
        writes=options.writes,
        rounds=options.rounds,
        batch=options.batch,
        tokens=options.tokens,
        threads=options.threads,
    )
    with progress_bar("rounds") as advance:
        report = bench_blackbox(order, advance)
    output.hand_over(report, *tables(report))
    return 0 if report.meets_goal else 1
