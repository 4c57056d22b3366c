"""A verdict as Markdown, to be pasted into an issue of the engine it is about.

Pure. Invariants: it holds no secret that `redact` knows; text from a server stands in code blocks and spans
that it cannot leave, so that it is never read as a link, a mention or HTML.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

import msgspec

from firstlight.doctor.case.evidence import Case, Evidence
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import TargetProcess
from firstlight.doctor.case.values_process import Environment, Libraries, LogTail, PythonStacks
from firstlight.doctor.case.view import View
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Clue
from firstlight.doctor.looks import TEXTS
from firstlight.doctor.report.report_text import (
    failures,
    headline,
    name_of,
    printable,
    process_table,
    wait_lines,
)

_MAX_EXCERPT_CHARS = 1500
_MAX_LOG_LINES = 25
_MAX_FRAMES = 15
_MAX_CITED = 20
_TICKS = re.compile(r"`+")


def report_markdown(view: View, verdict: Verdict) -> str:
    """The whole issue, its title in the first line."""
    parts = [
        f"# {_escaped(headline(verdict))}",
        "",
        f"Server: {code(name_of(view.case.target))}",
        "",
        *_versions(view.case),
        *_commands(view.case),
        *_verdict(verdict),
        *_block("Processes", process_table(view.motion.processes, view)),
        *_block("Who waits for whom", wait_lines(view)),
        *_excerpts(view.case, verdict),
        *_block("Looks that failed", failures(view.case)),
        *_list("Beware", map(_escaped, verdict.cautions)),
    ]
    return hide_in_text("\n".join(parts).rstrip()) + "\n"


def code(text: str) -> str:
    """A code span that holds any text."""
    shown = printable(text).strip() or " "
    fence = "`" * (1 + max((len(run) for run in _TICKS.findall(shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _escaped(text: str) -> str:
    """Prose in which only what stands in `…` is code; nothing else has a meaning in Markdown."""
    parts = re.split(r"(`[^`]+`)", printable(text))
    return "".join(
        part if part.startswith("`") and part.endswith("`") and len(part) > 2 else _plain(part)
        for part in parts
    )


def _plain(text: str) -> str:
    """An at sign is kept from naming somebody by a blank of no width: a backslash does not do that."""
    return re.sub(r"([\\`*_\[\]<>#|~!])", r"\\\1", text).replace("@", "@\u200b")


def _versions(case: Case) -> Iterator[str]:
    yield "## Environment"
    yield ""
    yield f"- examined by {code(case.made_by or 'unknown')}"
    if case.made_wall_s:
        yield f"- at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(case.made_wall_s))}"
    for name, value in sorted(case.host.items()):
        yield f"- {name} {code(value)}"
    libraries = {one.path for seen in case.all(Libraries) for one in seen.value.libraries}
    told = [path for path in sorted(libraries) if re.search(r"nccl|libtorch_c|cudart|nvrtc|sgl_kernel", path)]
    for path in told[:12]:
        yield f"- loaded {code(path)}"
    variables = {pair for seen in case.all(Environment) for pair in seen.value.variables.items()}
    quiet = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH")
    yield from (f"- {code(f'{name}={value}')}" for name, value in sorted(variables) if name not in quiet)
    yield ""


def _commands(case: Case) -> list[str]:
    """How it was started: the first process with arguments of its own."""
    named: list[TargetProcess] = [process for process in case.target.processes if len(process.command) > 1]
    return _block("Command", [" ".join(named[0].command)] if named else [])


def _verdict(verdict: Verdict) -> Iterator[str]:
    yield "## Verdict"
    yield ""
    yield f"{verdict.condition.value}, cause {code(verdict.cause)}, {verdict.grade.value}."
    yield ""
    yield from _list("For it", map(_cited, verdict.supports))
    yield from _list("Against it", map(_cited, verdict.contradicts))
    missing = dict.fromkeys((*verdict.decisive, *verdict.not_measured))
    yield from _list("Not measured", (f"{_escaped(TEXTS[look][0])} ({TEXTS[look][1]})" for look in missing))
    yield from _list("Next test", [_escaped(verdict.next_test)] if verdict.next_test else [])
    yield from _list(
        "Other causes",
        (f"{code(one.cause)} ({one.grade.value}): {_escaped(one.summary)}" for one in verdict.others),
    )


def _cited(clue: Clue) -> str:
    return f"{_escaped(clue.text)} {' '.join(code(one) for one in clue.evidence)}".rstrip()


def _excerpts(case: Case, verdict: Verdict) -> Iterator[str]:
    """The evidence that the verdict cites; and, cited or not, the stacks and the ends of the logs."""
    wanted = dict.fromkeys(one for clue in (*verdict.supports, *verdict.contradicts) for one in clue.evidence)
    cited = [evidence for one in list(wanted)[:_MAX_CITED] if (evidence := case.by_id(one))]
    more = [evidence for evidence in case.evidence if _is_shown(evidence, case) and evidence not in cited]
    if cited or more:
        yield "## Evidence"
        yield ""
    for evidence in (*cited, *more):
        yield f"{code(evidence.id)} from {code(evidence.source)}, look {evidence.look}"
        yield ""
        yield from fenced(_shown(evidence))
        yield ""


def _is_shown(evidence: Evidence, case: Case) -> bool:
    value = evidence.value
    has_content = bool(value.lines) if isinstance(value, LogTail) else isinstance(value, PythonStacks)
    return has_content and evidence.look == case.last_look


def _shown(evidence: Evidence) -> list[str]:
    value = evidence.value
    if isinstance(value, LogTail):
        return list(value.lines[-_MAX_LOG_LINES:])
    if isinstance(value, PythonStacks):
        return list(_frames(value))
    text = msgspec.json.encode(value).decode()
    return [text if len(text) <= _MAX_EXCERPT_CHARS else f"{text[:_MAX_EXCERPT_CHARS]}…"]


def _frames(stacks: PythonStacks) -> Iterator[str]:
    for thread in stacks.threads[:4]:
        marks = f"{', active' if thread.is_active else ''}{', holds the GIL' if thread.owns_gil else ''}"
        yield f"thread {thread.tid} {thread.name}{marks}"
        yield from (f"    {one.function} ({one.file}:{one.line})" for one in thread.frames[:_MAX_FRAMES])


def fenced(lines: Iterable[str]) -> list[str]:
    """A code block that its content cannot end."""
    shown = [printable(line) for line in lines]
    longest = max((len(run) for line in shown for run in _TICKS.findall(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *shown, fence]


def _block(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [f"## {title}", "", *fenced(found), ""] if found else []


def _list(title: str, rows: Iterable[str]) -> list[str]:
    found = [f"- {row}" for row in rows]
    return [f"### {title}", "", *found, ""] if found else []
