"""`firstlight doctor`: what is the matter with a model server, why we think so, and what to do.

Registered by `cli.main`. Invariant: it reads and asks, and changes nothing: no stop, no file but the bundle
that was asked for, no signal but the one by which a rank of ours writes its stacks; a bundle is judged
without a look at this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.base.errors import UsageError
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.cli.doctor_output import Examined

_POINTING = ("pid", "url", "run", "replay")
_LIVE_ONLY = ("watch", "bundle", "generate", "api_key_file")


@dataclass
class DoctorOptions:
    """What `doctor` takes."""

    pid: Annotated[
        int | None, typer.Option(help="The server that this process belongs to.", metavar="PID", min=1)
    ] = None
    url: Annotated[
        str | None, typer.Option(help="The server that listens there, if it is on this machine.")
    ] = None
    run: Annotated[
        str | None,
        typer.Option(help="A run of `firstlight serve`, alive or dead: its directory.", metavar="DIR"),
    ] = None
    watch: Annotated[
        bool,
        typer.Option("--watch", metavar="", help="Stay, and say when the verdict changes; Ctrl-C ends."),
    ] = False
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write all evidence, without secrets, into a new file.", metavar="FILE"),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(help="Judge a bundle; nothing on this machine is looked at.", metavar="FILE"),
    ] = None
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    markdown: Annotated[
        bool, typer.Option("--markdown", metavar="", help="Print an issue for the engine's maintainers.")
    ] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", metavar="", help="Also what is excluded, and each engine's remedy."),
    ] = False
    generate: Annotated[
        bool, typer.Option("--generate", metavar="", help="Ask the server for one token, as a client would.")
    ] = False
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the server's key. Default: the run's own, or FIRSTLIGHT_API_KEY.",
            metavar="FILE",
        ),
    ] = None
    looks: Annotated[int, typer.Option(help="Looks at what moves.", metavar="N", min=1, max=10)] = 2
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", metavar="SECONDS", min=0.1, max=600)
    ] = 2.0
    debug: Debug = False


def doctor(options: DoctorOptions) -> int:
    """Say whether the model servers of this machine are healthy, and if not, why.

    It finds servers of firstlight, vLLM and SGLang by itself, also those that
    somebody else started. It only looks: nothing is stopped, restarted or
    deleted. docs/doctor.md tells what it knows and how it looks.

    Exit codes: 0 healthy, 10 starting, 11 slow, 12 stuck, 13 dead, 14 unclear;
    of several servers the worst. 2: nothing was found, wrong options, or a
    file that is no bundle; 3: a bundle that is cut or damaged.

    Examples:
      firstlight doctor
      firstlight doctor --pid 4711 --generate
      firstlight doctor --url http://127.0.0.1:8000 --verbose
      firstlight doctor --run /tmp/firstlight-ab12cd34
      firstlight doctor --watch
      firstlight doctor --bundle stall.bundle
      firstlight doctor --replay stall.bundle --markdown
    """
    _check(options)
    from firstlight.cli.doctor_output import show
    from firstlight.doctor.report.exit_codes import EXIT_CODES, worst

    if options.replay is not None:
        examined = _replayed(options.replay)
    elif options.watch:
        from firstlight.cli.doctor_watch import watch

        return watch(options)
    else:
        examined = _examined(options)
    show(examined, options)
    return EXIT_CODES[worst(one.verdict.condition for one in examined)]


def _check(options: DoctorOptions) -> None:
    pointed = [name for name in _POINTING if getattr(options, name) is not None]
    if len(pointed) > 1:
        flags = " and ".join(f"--{name}" for name in pointed)
        raise UsageError(f"{flags} point at different things.", "Give one of them.")
    extra = [name for name in _LIVE_ONLY if getattr(options, name)]
    if options.replay is not None and extra:
        raise UsageError(
            f"--{extra[0].replace('_', '-')} looks at a living server, and --replay looks at none.",
            "Leave one of them out.",
        )
    if options.json and options.markdown:
        raise UsageError("--json and --markdown are two forms of one answer.", "Give one of them.")
    if options.watch and (options.bundle or options.markdown):
        raise UsageError("--watch prints a line for each change and nothing more.", "Leave one of them out.")
    if options.bundle is not None and options.bundle.exists():
        raise UsageError(f"{options.bundle} exists already.", "Give the bundle another name.")


def _replayed(path: Path) -> list[Examined]:
    from firstlight.cli.doctor_output import judged
    from firstlight.doctor.case.bundle import read_bundle

    return [judged(case) for case in read_bundle(path)]


def _examined(options: DoctorOptions) -> list[Examined]:
    """Every target looked at; with a bundle the verdict is on what stands in it."""
    from firstlight.cli.doctor_output import judged
    from firstlight.cli.doctor_targets import examine_one, targets_of
    from firstlight.doctor.case.bundle import redact_case, write_bundle

    cases = [examine_one(target, options) for target in targets_of(options)]
    if options.bundle is not None:
        cases = [redact_case(case) for case in cases]
        write_bundle(options.bundle, cases)
    return [judged(case) for case in cases]
