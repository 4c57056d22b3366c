"""A verdict with its evidence, as text for a person and as JSON for a program.

Invariant: both say the same verdict, and every number stands in the JSON.
"""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec

from firstlight.drafter.explain.evidence import Evidence
from firstlight.drafter.explain.finding import Finding, Side, Sure
from firstlight.drafter.explain.judge import Verdict

WIDTH = 110
_FINE = (
    "In this process the engine serves the drafter as the reference does. If it is still too slow, more data "
    "or training is the way, not the engine."
)
_NOT_MEASURED = (
    "Nothing that was looked at is wrong, but what the engine drafts could not be measured, so that this "
    "clears nobody: see below what stood in the way, and run it again."
)


def as_text(evidence: Evidence, verdict: Verdict) -> str:
    """The report."""
    head = verdict.side.value if not verdict.cause else f"{verdict.side.value} ({verdict.cause})"
    parts = [f"Verdict: {head}", "", *_numbers(evidence)]
    if verdict.side is Side.FINE:
        parts += ["", *textwrap.wrap(_FINE, WIDTH)]
    if verdict.side is Side.NOT_MEASURED:
        parts += ["", *textwrap.wrap(_NOT_MEASURED, WIDTH)]
    for number, finding in enumerate(verdict.findings, 1):
        parts += ["", *_finding(number, finding)]
    parts += ["", "Looked at, and found in order:"]
    parts += [f"  - {_sentence(promise)}" for promise in verdict.passed]
    if evidence.notes:
        parts += ["", "Not measured:", *(f"  - {note}" for note in evidence.notes)]
    return "\n".join(parts)


def as_json(evidence: Evidence, verdict: Verdict) -> bytes:
    """The same with all numbers."""
    values: dict[str, Any] = {
        "verdict": verdict.side.value,
        "cause": verdict.cause,
        "exit_code": verdict.exit_code,
        "findings": [
            msgspec.to_builtins(finding) | {"sure": finding.sure.name.lower()} for finding in verdict.findings
        ],
        "passed": verdict.passed,
        "evidence": msgspec.to_builtins(evidence),
    }
    return msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"


def _numbers(evidence: Evidence) -> list[str]:
    lines = [f"drafter {evidence.drafter}", f"target  {evidence.target}"]
    accuracy, loop = evidence.accuracy, evidence.own_loop
    if accuracy is not None and loop is not None:
        shown = " ".join(f"{100 * value:.1f}" for value in accuracy.accuracy)
        whose = "held-out" if evidence.data is not None and evidence.data.held_out else "not held out"
        lines += [
            f"offline, reference states: {shown} % of drafts right ({accuracy.num_tokens} first ones, "
            f"{whose})",
            f"acceptance length at k = {loop.k}: predicted {accuracy.predicted_length:.2f}, own loop "
            f"{loop.acceptance_length:.2f} ({loop.low:.2f} to {loop.high:.2f})",
        ]
    for served in (evidence.engine, evidence.served):
        if served is not None:
            lines.append(f"  {served.source}: {served.acceptance_length:.2f} at k = {served.k}")
        if served is not None and served is evidence.engine and evidence.engine_loop is not None:
            lines[-1] += f" (own loop on the same text: {evidence.engine_loop.acceptance_length:.2f})"
    return lines


def _finding(number: int, finding: Finding) -> list[str]:
    lines = [f"{number}. {finding.cause} [{finding.side.value}, {Sure(finding.sure).name.lower()}]"]
    lines += textwrap.wrap(finding.said, WIDTH, initial_indent="   ", subsequent_indent="   ")
    for item in finding.evidence:
        lines += textwrap.wrap(item, WIDTH, initial_indent="   - ", subsequent_indent="     ")
    step = f"next: {finding.next_step}"
    return lines + textwrap.wrap(step, WIDTH, initial_indent="   ", subsequent_indent="   ")


def _sentence(promise: str) -> str:
    return promise[0].lower() + promise[1:].rstrip(".")
