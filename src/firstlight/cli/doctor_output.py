"""The doctor's verdicts as text, JSON or Markdown on standard output.

Invariant: the three forms are made from the same verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.view import View, view_of
from firstlight.doctor.finding import Verdict
from firstlight.doctor.looks import TEXTS
from firstlight.doctor.report.exit_codes import EXIT_CODES, worst
from firstlight.doctor.report.report_markdown import report_markdown
from firstlight.doctor.report.report_text import failures, report_text
from firstlight.doctor.verdict import judge_view

if TYPE_CHECKING:
    from firstlight.cli.doctor_options import DoctorOptions

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class Examined(NamedTuple):
    """One server after the examination."""

    view: View
    verdict: Verdict


def judged(case: Case) -> Examined:
    """The verdict on a case."""
    view = view_of(case)
    return Examined(view, judge_view(view))


def show(examined: Sequence[Examined], options: DoctorOptions) -> None:
    """Print all verdicts in the form that was asked for."""
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(examined)), indent=2).decode())
    elif options.markdown:
        print("\n---\n\n".join(report_markdown(*one) for one in examined), end="")
    else:
        texts = (report_text(*one, is_verbose=options.verbose) for one in examined)
        print("\n\n\n".join("\n".join(_marked(lines)) for lines in texts))


def as_json(examined: Sequence[Examined]) -> dict[str, Any]:
    """`servers` with a verdict each, and the exit code of the worst."""
    condition = worst(one.verdict.condition for one in examined)
    return {
        "condition": condition.value,
        "exit_code": EXIT_CODES[condition],
        "servers": [_server(*one) for one in examined],
    }


def _server(view: View, verdict: Verdict) -> dict[str, Any]:
    """The verdict's own fields; then who it is about, what each process does, and the evidence cited."""
    case = view.case
    clues = (*verdict.supports, *verdict.contradicts)
    cited = dict.fromkeys(one for clue in clues for one in clue.evidence)
    wanted = dict.fromkeys((*verdict.decisive, *verdict.not_measured))
    return {
        **msgspec.to_builtins(verdict),
        "exit_code": EXIT_CODES[verdict.condition],
        "looks": {look.value: dict(zip(("what", "how"), TEXTS[look], strict=True)) for look in wanted},
        "target": msgspec.to_builtins(case.target),
        "processes": msgspec.to_builtins(view.motion.processes),
        "waits": msgspec.to_builtins(view.graph.edges),
        "deadlocks": msgspec.to_builtins(view.graph.cycles),
        "evidence": {one: msgspec.to_builtins(found) for one in cited if (found := case.by_id(one))},
        "failed_looks": failures(case),
        "made_by": case.made_by,
        "made_wall_s": case.made_wall_s,
    }


def _marked(lines: list[str]) -> list[str]:
    """The first line stands out on a terminal."""
    return [f"{_BOLD}{lines[0]}{_PLAIN}", *lines[1:]] if sys.stdout and sys.stdout.isatty() else lines
