"""A verdict as text for a person at three in the morning: what it is and what to do first, then why.

Pure: from a view and its verdict to lines. Invariant: nothing that was read from a server or bundle can steer
the terminal, and commands are never broken over lines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import Engine, Role, Target
from firstlight.doctor.case.view import View
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Clue, Condition, Look, Remedies
from firstlight.doctor.looks import TEXTS
from firstlight.doctor.motion.motion import ProcessMotion
from firstlight.doctor.report import describe

_WIDTH = 110
_INDENT = "  "
_MOST_ROWS, _MOST_EDGES = 24, 12
_HEADINGS = ("PROCESS", "PID", "STATE", "CORES", "PHASE")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_QUIET = (Role.HELPER, Role.COMPILER, Role.JANITOR)


def report_text(view: View, verdict: Verdict, *, is_verbose: bool = False) -> list[str]:
    """The whole report, the verdict in its first line."""
    lines = [headline(verdict), *_about(view, verdict)]
    if verdict.condition is not Condition.HEALTHY or is_verbose:
        lines += _reasons(verdict)
    lines += _section("processes", process_table(view.motion.processes, view), is_text=False)
    lines += _section("who waits for whom", wait_lines(view), is_text=False)
    lines += _others(verdict, is_verbose=is_verbose)
    if is_verbose:
        lines += _details(view, verdict)
    return [printable(line) for line in lines]


def headline(verdict: Verdict) -> str:
    """Condition, cause and grade, and what happened, in one line."""
    summary = verdict.summary.strip()
    return printable(f"{verdict.condition.value.upper()}: {summary} [{verdict.cause}, {verdict.grade.value}]")


def printable(text: str) -> str:
    """Without the characters that move a terminal's cursor, colour it, or turn its text around."""
    return _UNPRINTABLE.sub("?", text.replace("\n", " "))


def name_of(target: Target) -> str:
    """A server in a line: its engine, model, address and where it runs."""
    engine = "model server" if target.engine is Engine.UNKNOWN else f"{target.engine.value} server"
    parts = [engine]
    parts += [target.model] if target.model else []
    parts += [f"{host}:{port}" if ":" not in host else f"[{host}]:{port}" for host, port in target.addresses]
    parts += [f"run {target.run_dir}"] if target.run_dir else []
    return ", ".join(parts)


def process_table(motions: Sequence[ProcessMotion], view: View) -> list[str]:
    """A row for each process that matters: what it is doing, by two looks."""
    shown = [motion for motion in motions if motion.role not in _QUIET or motion.progress]
    if not shown:
        return []
    rows = [_HEADINGS, *(_row(motion, view) for motion in shown[:_MOST_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    left_out = len(motions) - min(len(shown), _MOST_ROWS)
    return [*lines, f"and {left_out} more (janitor, helpers, compilers)"] if left_out else lines


def wait_lines(view: View) -> list[str]:
    """The wait-for graph: an arrow leads from who waits to whom it waits for."""
    graph = view.graph
    lines = [f"{edge.waiter} -> {edge.holder}  {edge.kind}: {edge.why}" for edge in graph.edges[:_MOST_EDGES]]
    left_out = len(graph.edges) - _MOST_EDGES
    lines += [f"and {left_out} more"] if left_out > 0 else []
    return lines + [f"deadlock: {' <-> '.join(cycle)}" for cycle in graph.cycles]


def look_lines(looks: Iterable[Look]) -> list[str]:
    """What to look at, and what takes the look."""
    return [f"{what}: {how}" for what, how in (TEXTS[look] for look in looks)]


def cited(clue: Clue) -> str:
    """A clue with the evidence it stands in."""
    return f"{clue.text}  [{', '.join(clue.evidence)}]" if clue.evidence else clue.text


def _about(view: View, verdict: Verdict) -> list[str]:
    case = view.case
    who = f"about {describe.named(view, verdict.subject)}; " if verdict.subject else ""
    lines = [f"{_INDENT}{who}{name_of(case.target)}"]
    ranks = f"{view.motion.living_ranks} of {view.motion.expected_ranks} ranks alive"
    if view.motion.expected_ranks is not None and case.target.is_complete:
        lines[0] += f"; {ranks}"
    return [*lines, *(f"{_INDENT}note: {note}" for note in case.target.notes)]


def _reasons(verdict: Verdict) -> Iterator[str]:
    has_remedy = verdict.remedy.rstrip(".") not in ("", "nothing")
    yield from _section("what to do", [verdict.remedy] if has_remedy else [], is_text=False)
    yield from _section("next test", [verdict.next_test] if verdict.next_test else [], is_text=False)
    yield from _section("for it", map(cited, verdict.supports), mark="+")
    yield from _section("against it", map(cited, verdict.contradicts), mark="-")
    missing = [look for look in verdict.not_measured if look not in verdict.decisive]
    yield from _section("not measured", look_lines(missing), mark="?", is_text=False)
    title = "looks that would decide, the best first"
    yield from _section(title, _counted(look_lines(verdict.decisive)), is_text=False)
    yield from _section("beware", verdict.cautions, mark="!")


def _others(verdict: Verdict, *, is_verbose: bool) -> Iterator[str]:
    rows = []
    for finding in verdict.others:
        rows.append(f"{finding.grade.value:9}  {finding.cause}: {finding.summary}")
        if is_verbose:
            rows += [f"{'':11}+ {cited(clue)}" for clue in finding.supports]
            rows += [f"{'':11}- {cited(clue)}" for clue in finding.contradicts]
            rows += [f"{'':11}test: {finding.next_test}"] if finding.next_test else []
    yield from _section("other causes", rows, is_text=False)


def _details(view: View, verdict: Verdict) -> Iterator[str]:
    """What only --verbose shows: remedies for each engine, what is excluded, the failed looks."""
    engines = Remedies.__struct_fields__
    remedies = [f"{engine:7}  {getattr(verdict.remedies, engine)}" for engine in engines]
    yield from _section("remedy by engine", remedies, is_text=False)
    excluded = [f"{one.cause}: {'; '.join(cited(clue) for clue in one.because)}" for one in verdict.excluded]
    yield from _section("excluded", excluded)
    yield from _section("looks that failed", failures(view.case))


def failures(case: Case) -> list[str]:
    """What was tried and not learnt, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for seen in case.failures():
        found.setdefault((seen.value.collector, seen.value.reason), []).append(seen.subject)
    return [
        f"{collector}: {reason} ({', '.join(dict.fromkeys(subjects))})"
        for (collector, reason), subjects in found.items()
    ]


def _row(motion: ProcessMotion, view: View) -> tuple[str, ...]:
    cores = "" if motion.cores is None else f"{motion.cores:.2f}"
    phase = describe.where(view, motion.key).removeprefix(", in phase ")
    return motion.key, str(view.pid(motion.key) or ""), motion.state.value, cores, phase


def _counted(lines: Sequence[str]) -> list[str]:
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _section(title: str, rows: Iterable[str], *, mark: str = "", is_text: bool = True) -> Iterator[str]:
    """A title and its rows, if there are any; prose is folded, commands and tables are not."""
    found = list(rows)
    if not found:
        return
    yield ""
    yield title
    lead = f"{_INDENT}{mark} " if mark else _INDENT
    for row in found:
        if is_text:
            yield from _folded(printable(row), lead)
        else:
            yield f"{lead}{row}"


def _folded(text: str, lead: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
