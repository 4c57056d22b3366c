"""`firstlight doctor`: what is the matter with a model server, why we think so, and what to do.

Invariant: it reads and asks, and changes nothing: no stop, no file but the bundle that was asked for, no
signal but the one by which a rank of ours writes its stacks; a bundle is judged without a look at this
machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.base.errors import UsageError
from firstlight.cli.doctor_options import DoctorOptions

if TYPE_CHECKING:
    from firstlight.cli.doctor_output import Examined

_POINTING = ("pid", "url", "run", "replay")
_LIVE_ONLY = ("watch", "bundle", "generate", "api_key_file")


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
