"""From a case to one verdict: what the server is, why we think so, what speaks against it, and what to do.

Pure. Invariant: a cause is named only with evidence; with none that suffices the verdict is "unknown", with
the causes that are left, in order, and the looks that would decide between them.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

import msgspec

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_host import HttpProbe
from firstlight.doctor.case.values_process import ExitRecord
from firstlight.doctor.case.view import View, view_of
from firstlight.doctor.cautions import cautions_of
from firstlight.doctor.finding import Excluded, Finding, Verdict
from firstlight.doctor.hypotheses.deaths import DIED
from firstlight.doctor.hypotheses.registry import HYPOTHESES
from firstlight.doctor.hypothesis import (
    Clue,
    Condition,
    Grade,
    Hypothesis,
    Judgement,
    Remedies,
    Weight,
    same,
)
from firstlight.doctor.looks import decisive, is_taken
from firstlight.doctor.motion.motion import State, Thresholds
from firstlight.doctor.recorded import cite, has_ended, word_of_supervisor
from firstlight.doctor.report import describe

UNKNOWN, IDLE, WORKING, ON_ITS_WAY = "unknown", "idle", "working", "on-its-way"
ABSENT, ENDED = "no-server", "ended"
_GRADES = list(Grade)
_NUM_OTHERS = 8
_NUM_OPEN = 12
_CONDITIONS = {
    State.IDLE: Condition.HEALTHY,
    State.SLOW: Condition.SLOW,
    State.BLOCKED: Condition.STUCK,
    State.SPINNING: Condition.STUCK,
    State.STOPPED: Condition.STUCK,
    State.ZOMBIE: Condition.DEAD,
    State.DEAD: Condition.DEAD,
    State.UNCLEAR: Condition.UNCLEAR,
}


def judge(
    case: Case,
    thresholds: Thresholds | None = None,
    quiet_s: Mapping[str, float] | None = None,
    hypotheses: Sequence[Hypothesis] = HYPOTHESES,
) -> Verdict:
    """The verdict on a case. `quiet_s`: for how long each process has not moved, if somebody watched."""
    return judge_view(view_of(case, thresholds, quiet_s), hypotheses)


def judge_view(view: View, hypotheses: Sequence[Hypothesis] = HYPOTHESES) -> Verdict:
    """The same of a case whose motion has been judged."""
    findings, excluded = _weigh(view, hypotheses)
    base = condition_of(view)
    chosen = _choose(view, findings, base)
    others = tuple(finding for finding in findings if finding is not chosen)
    if (seen := word_of_supervisor(view)) is not None:
        if has_ended(view, seen):  # which is that very event
            others = tuple(finding for finding in others if finding.cause != DIED.card.cause)
        chosen = cite(view, chosen, {one.card.cause: one.card.depth for one in hypotheses})
    is_open = chosen.cause == UNKNOWN
    if not is_open:
        others = tuple(finding for finding in others if finding.grade is not Grade.POSSIBLE)
    return Verdict(
        **{name: getattr(chosen, name) for name in Finding.__struct_fields__ if name != "is_recorded"},
        remedy=chosen.remedies.of(view.case.target.engine),
        others=others[: _NUM_OPEN if is_open else _NUM_OTHERS],
        excluded=excluded,
        decisive=decisive(view.case, [one.not_measured for one in others]) if is_open else (),
        cautions=cautions_of(view),
    )


def condition_of(view: View) -> Condition:
    """What motion says; but a server whose port gives no answer is stuck, however it looks."""
    if view.motion.serving.is_up and view.motion.state in (State.MOVING, State.IDLE) and _is_deaf(view):
        return Condition.STUCK
    if view.motion.state is State.IDLE and not view.motion.living_ranks and view.motion.expected_ranks:
        return Condition.DEAD  # whoever is left only watches
    if view.motion.state is State.MOVING:
        return Condition.HEALTHY if view.motion.serving.is_up else Condition.STARTING
    return _CONDITIONS[view.motion.state]


def _is_deaf(view: View) -> bool:
    """Whether every question to its ports, in two looks, was left without an answer."""
    probes = [seen for seen in view.case.all(HttpProbe) if seen.value.outcome != "refused"]
    looks = {seen.evidence.look for seen in probes}
    return len(looks) > 1 and not any(seen.value.outcome == "answered" for seen in probes)


def _weigh(view: View, hypotheses: Sequence[Hypothesis]) -> tuple[list[Finding], tuple[Excluded, ...]]:
    """What is possible, the likeliest first; and what is excluded."""
    weighed: list[tuple[tuple[int, ...], Finding]] = []
    excluded = []
    for index, hypothesis in enumerate(hypotheses):
        judgement = hypothesis.judge(view)
        if judgement is None:
            continue
        if judgement.vetoes:
            excluded.append(Excluded(cause=hypothesis.card.cause, because=judgement.vetoes))
            continue
        # A root that is supported comes before a consequence that is proved: a rank that died of a full
        # /dev/shm is dead for certain, but that is not why.
        grade = _GRADES.index(judgement.grade)
        card, score = hypothesis.card, judgement.score
        is_open = judgement.grade is Grade.POSSIBLE
        place = (
            (max(grade, 1), -score, -card.prior) if is_open else (max(grade, 1), card.depth, grade, -score)
        )
        weighed.append(((*place, index), _finding(view, hypothesis, judgement)))
    weighed.sort(key=lambda item: item[0])
    return [finding for _, finding in weighed], tuple(excluded)


def _finding(view: View, hypothesis: Hypothesis, judgement: Judgement) -> Finding:
    card = hypothesis.card
    fills = _Fills(judgement.fills)
    if judgement.subject is not None:
        fills.setdefault("pid", str(view.pid(judgement.subject) or "PID"))
    fills.setdefault("run", view.case.target.run_dir or "RUN_DIR")
    fills.setdefault("model", view.case.target.model or "MODEL")
    return Finding(
        cause=card.cause,
        grade=judgement.grade,
        condition=judgement.condition or card.condition,
        subject=judgement.subject,
        summary=judgement.summary or f"{card.title}.",
        supports=judgement.supports,
        contradicts=judgement.contradicts,
        not_measured=tuple(look for look in card.looks if not is_taken(view.case, look)),
        next_test=_fill(card.next_test, fills),
        remedies=Remedies(
            native=_fill(card.remedies.native, fills),
            vllm=_fill(card.remedies.vllm, fills),
            sglang=_fill(card.remedies.sglang, fills),
        ),
        is_recorded=card.is_recorded,
    )


class _Fills(dict[str, str]):
    """A field that nobody filled stands for itself in capitals, as in a command to be completed."""

    def __missing__(self, name: str) -> str:
        return name.upper()


def _fill(text: str, fills: Mapping[str, str]) -> str:
    return string.Formatter().vformat(text, (), fills)


def _choose(view: View, findings: Sequence[Finding], base: Condition) -> Finding:
    """The finding that is the verdict."""
    if not view.motion.processes:
        notes = "".join(f"; {note}" for note in view.case.target.notes)
        return _plain(Condition.UNCLEAR, ABSENT, f"no process of a model server was found{notes}.")
    sure = [finding for finding in findings if finding.grade in (Grade.PROVED, Grade.SUPPORTED)]
    likely = [finding for finding in findings if finding.grade is not Grade.POSSIBLE]
    if base in (Condition.HEALTHY, Condition.STARTING, Condition.SLOW):
        return _moving(view, likely, base)
    if base is Condition.UNCLEAR:
        blind = [finding for finding in likely if finding.condition is Condition.UNCLEAR]
        return next(iter((*sure, *blind)), None) or _unknown(view, base, len(findings))
    if _has_ended(view):
        return _plain(
            base, ENDED, "all of its processes have ended, and none left a word.", view.motion.evidence
        )
    fatal = [finding for finding in likely if finding.condition in (Condition.STUCK, Condition.DEAD)]
    return fatal[0] if fatal else (likely[0] if likely else _unknown(view, base, len(findings)))


def _moving(view: View, likely: Sequence[Finding], base: Condition) -> Finding:
    """It moves or rests: only what explains slowness, or is proved, is said."""
    proved = [finding for finding in likely if finding.grade is Grade.PROVED]
    broken = [finding for finding in proved if finding.condition in (Condition.STUCK, Condition.DEAD)]
    if broken:
        return broken[0]
    slow = [finding for finding in likely if finding.condition in (Condition.SLOW, Condition.STARTING)]
    if slow and base is not Condition.HEALTHY:
        return slow[0]
    # A server that serves may still do so with half its work thrown away, as with drafts of the wrong kind.
    wasteful = [finding for finding in proved if finding.condition is Condition.SLOW]
    if wasteful:
        return wasteful[0]
    reasons = "; ".join(view.motion.reasons[:3]) or "nothing is wrong"
    if base is Condition.HEALTHY:
        is_idle = view.motion.state is State.IDLE
        cause = IDLE if is_idle else WORKING
        return _plain(
            base, cause, f"it is healthy{' and idle' if is_idle else ''}: {reasons}.", view.motion.evidence
        )
    return _plain(base, ON_ITS_WAY, f"it is on its way: {reasons}.", view.motion.evidence)


def _has_ended(view: View) -> bool:
    """Whether it is simply gone, as after a stop that somebody asked for."""
    is_gone = all(motion.state is State.DEAD for motion in view.workers)
    return is_gone and all(seen.value.was_told for seen in view.case.all(ExitRecord))


def _plain(condition: Condition, cause: str, summary: str, evidence: tuple[str, ...] = ()) -> Finding:
    clue = Clue(text=summary, evidence=evidence, weight=Weight.SOME)
    return Finding(
        cause=cause,
        grade=Grade.SUPPORTED if evidence else Grade.POSSIBLE,
        condition=condition,
        subject=None,
        summary=summary,
        supports=(clue,) if evidence else (),
    )


def _unknown(view: View, base: Condition, num_left: int) -> Finding:
    """Nothing suffices: what was seen of the suspect, or that two looks are missing."""
    suspect = view.suspect
    if suspect is None:
        reasons = dict.fromkeys(reason for motion in view.workers for reason in motion.reasons)
        why = "; ".join(reasons) or "what was measured does not decide"
        return _plain(base, UNKNOWN, f"cause unknown, {num_left} causes are left: {why}.")
    parts = [f"{describe.named(view, suspect.key)} {describe.state(suspect)}"]
    parts[0] += describe.where(view, suspect.key)
    if frames := describe.stack(view, suspect.key):
        parts.append(f"its main thread is in {frames}")
    finding = _plain(base, UNKNOWN, f"cause unknown: {'; '.join(parts)}.", suspect.evidence)
    return msgspec.structs.replace(
        finding,
        grade=Grade.SUSPECTED,
        subject=suspect.key,
        next_test="compare the stacks of all ranks: `py-spy dump --nonblocking --pid PID` for each.",
        remedies=same("write a bundle with `firstlight doctor --bundle FILE` before anything is restarted."),
    )
