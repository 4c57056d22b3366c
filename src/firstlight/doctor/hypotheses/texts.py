"""Causes that name themselves in a text: the words of a fatal error, in a log or as a process's last ones.

Advice ("may be caused by …") is no error, and a line that points at another one ("See root cause above") is
never the root. Invariant: last words are proof, a line of a log only supports.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from firstlight.doctor.case.values_process import ExitRecord
from firstlight.doctor.case.view import Line, View
from firstlight.doctor.hypotheses.gpu_case import line_clue
from firstlight.doctor.hypothesis import Card, Clue, Hypothesis, Judgement, Weight

_ADVICE = re.compile(
    r"\b(?:may|might|could|can) be (?:caused|due|a result)|\bconsider\b|\btry (?:to |setting )?"
    r"|\bif you (?:see|get)|\bto avoid\b|\bplease (?:check|set|try|make sure)"
    r"|\bpossible (?:cause|reason|solution)|\bhint\b|\bin case of\b|\bto debug\b|\busually means\b",
    re.IGNORECASE,
)
_CASCADE = re.compile(
    r"See root cause above|See stack trace for root cause|Engine core initialization failed|EngineCore failed"
    r"|WorkerProc failed to start|WorkerProc initialization failed|Worker proc .* died"
    r"|scheduler died during initialization|Received sigquit from a child|EngineDeadError"
    r"|The above exception was"
)
_OVERCOME = r"ready to roll|Application startup complete|Decode batch|Avg prompt throughput"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def fatal_line(view: View, *patterns: str) -> Line | None:
    """The first line that says one of these as a fact, the first being the nearest to the root."""
    wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return next((line for line in view.lines if is_stated(line.text, wanted)), None)


def is_stated(text: str, wanted: re.Pattern[str]) -> bool:
    """Whether the words stand there as a fact: not after words of advice, not in the line of a cascade."""
    found = wanted.search(text)
    return found is not None and not _ADVICE.search(text[: found.start()]) and not _CASCADE.search(text)


def stated(view: View, *patterns: str) -> tuple[Clue, str | None] | None:
    """The clue of such words, and whose they are."""
    wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    for seen in view.case.all(ExitRecord):
        if is_stated(seen.value.message, wanted):
            text = f"last words of {seen.value.name}: {seen.value.message[:300]}"
            return Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF, group="words"), seen.subject
    line = fatal_line(view, *patterns)
    if line is None:
        return None
    owner = None if line.subject in ("run", "host") else line.subject
    return line_clue(line, Weight.STRONG, "words"), owner


def overcome(view: View) -> Clue | None:
    """That the server came up all the same."""
    line = view.find_line(_OVERCOME)
    if line is None or not view.motion.serving.is_up:
        return None
    return Clue(text="the server came up all the same", evidence=(line.evidence,))


def failing_place(view: View, line_evidence: str, text: str) -> str:
    """Function and file of the traceback frame that stands last before the error; empty without one."""
    found = ""
    for line in view.lines:
        if line.evidence != line_evidence:
            continue
        if text in line.text:
            break
        if match := _FRAME.search(line.text):
            found = f"{match[3]} ({match[1].rpartition('site-packages/')[2]}:{match[2]})"
    return found


def by_text(
    card: Card,
    *patterns: str,
    summarize: Callable[[View, Clue], str] | None = None,
    fill: Callable[[View], dict[str, str]] | None = None,
) -> Hypothesis:
    """A hypothesis that its own words decide. Without them it says nothing."""

    def judge(view: View) -> Judgement | None:
        found = stated(view, *patterns)
        if found is None:
            return None
        clue, subject = found
        against = overcome(view)
        return Judgement(
            supports=(clue,),
            contradicts=(against,) if against else (),
            subject=subject,
            summary=summarize(view, clue) if summarize else f"{card.title}: {clue.text}.",
            fills=fill(view) if fill else {},
        )

    return Hypothesis(card, judge)
