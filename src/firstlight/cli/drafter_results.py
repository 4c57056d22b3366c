"""`firstlight drafter check`, `evaluate`, `export` and `probe`: what a drafter is worth.

Invariant: results go to standard output, progress to standard error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.drafter_options import Attention, Out, TargetOption
from firstlight.cli.locate import locate, say
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from rich.table import Table

    from firstlight.drafter.evaluate import Report


@dataclass
class CheckOptions:
    """What `drafter check` takes."""

    out: Out
    target: TargetOption = None
    attention: Attention = "heads"
    debug: Debug = False


def check(options: CheckOptions) -> int:
    """Go through the gates: states, teacher, one answer learnt by heart, training equals serving.

    Of a drafter that was evaluated and exported, those of its results, its export and the engine, too; what
    they said then stands in its cards. Ends with exit code 1 at the first that stays closed, and says which
    side is at fault.

    Examples:
      firstlight drafter check --out my-drafter
    """
    from firstlight.drafter.export import renew_cards
    from firstlight.drafter.gate_record import GateRecord
    from firstlight.drafter.gates_after import every_gate
    from firstlight.drafter.target import open_target

    target = open_target(locate(options.target))
    record = GateRecord(options.out, target, say)
    for one in every_gate(options.out, target, options.attention):
        gate = one.measure()
        record.note(one, gate)
        print(f"{gate.state:6}  {gate.name}: {gate.said}", flush=True)
        if gate.stops:
            return 1
    renew_cards(options.out, target)
    return 0


@dataclass
class EvaluateOptions:
    """What `drafter evaluate` takes."""

    out: Out
    target: TargetOption = None
    drafts: Annotated[int, typer.Option(help="Drafts of a step: k.", min=1)] = 3
    documents: Annotated[int, typer.Option(help="Most held-out answers of a family.", min=1)] = 24
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Run folder of another training on the same states; repeatable.", metavar="DIR"),
    ] = None
    off_by_one: Annotated[
        int, typer.Option(help="Answers of a family to measure with the next blocks' states, too.", min=0)
    ] = 0
    debug: Debug = False


def evaluate(options: EvaluateOptions) -> None:
    """Measure the drafter on held-out answers: the chain loop by family, with intervals and baselines.

    Examples:
      firstlight drafter evaluate --out my-drafter
      firstlight drafter evaluate --out my-drafter --drafts 5
    """
    from firstlight.cli.bench_output import show
    from firstlight.drafter.evaluate import evaluate as run_stage
    from firstlight.drafter.evaluate import read_report
    from firstlight.drafter.evaluate_settings import EvaluateSettings
    from firstlight.drafter.target import open_target

    settings = EvaluateSettings(
        num_drafts=options.drafts,
        max_documents=options.documents,
        beside=tuple(str(folder) for folder in options.beside or ()),
        off_by_one=options.off_by_one,
    )
    run_stage(options.out, open_target(locate(options.target)), settings)
    report = read_report(options.out)
    show(table(report), teacher_forced(report))


def table(report: Report) -> Table:
    """The chain loop by drafter and group."""
    from rich.table import Table

    shown = Table(title=f"Held-out answers, greedy, drafter of step {report.step}")
    columns = ("drafter", "group", "k", "answers", "acceptance length", "95 %", "accepted", "by position")
    for column in columns:
        shown.add_column(column)
    for line in report.lines:
        positions = " ".join(f"{100 * value:.0f}" for value in line.by_position)
        shown.add_row(
            line.drafter,
            line.group,
            str(line.k),
            str(line.documents),
            f"{line.acceptance_length:.2f}",
            f"{line.low:.2f} to {line.high:.2f}",
            f"{100 * line.accepted_share:.0f} %",
            f"{positions} %",
        )
    return shown


def teacher_forced(report: Report) -> str:
    """What the accuracy at every position predicts."""
    rows = []
    for group, found in report.teacher_forced.items():
        accuracy = " ".join(f"{100 * value:.1f}" for value in found["accuracy"])
        rows.append(
            f"{group}: accuracy by draft {accuracy} % (all tokens of the target), acceptance length "
            f"{found['predicted_acceptance_length']:.2f} at k = {found['k']}"
        )
    return "\n".join(rows)


@dataclass
class ExportOptions:
    """What `drafter export` takes."""

    out: Out
    target: TargetOption = None
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="native, vllm, sglang, speculators or gguf; repeatable. Default: all.", metavar="NAME"
        ),
    ] = None
    debug: Debug = False


def export(options: ExportOptions) -> None:
    """Write the drafter as one folder for each engine, with card and probes; each is read back and compared.

    Examples:
      firstlight drafter export --out my-drafter
      firstlight drafter export --out my-drafter --engine native
    """
    from firstlight.base.errors import UsageError
    from firstlight.drafter.export import ENGINES
    from firstlight.drafter.export import export as run_stage
    from firstlight.drafter.target import open_target

    engines = tuple(options.engine or ENGINES)
    for engine in engines:
        if engine not in ENGINES:
            raise UsageError(f"{engine!r} is no form of an export.", f"Use one of {', '.join(ENGINES)}.")
    stage = run_stage(options.out, open_target(locate(options.target)), engines)
    for engine in engines:
        print(f"{stage.folder / engine}: {stage.manifest.numbers[engine]}")
    if stage.manifest.numbers["unfinished"]:
        print(f"not a finished drafter: {stage.manifest.numbers['unfinished']}")


@dataclass
class ProbeOptions:
    """What `drafter probe` takes."""

    folder: Annotated[Path, typer.Argument(help="An exported drafter.", metavar="FOLDER")]
    target: TargetOption = None
    debug: Debug = False


def probe(options: ProbeOptions) -> None:
    """Draft from the states stored with an exported drafter, and compare with what was stored.

    Examples:
      firstlight drafter probe my-drafter/export/native
    """
    from firstlight.drafter.probes import check_probes
    from firstlight.drafter.target import open_target, read_ends

    target = open_target(locate(options.target))
    print(check_probes(options.folder, target, read_ends(target.checkpoint).embedding))
