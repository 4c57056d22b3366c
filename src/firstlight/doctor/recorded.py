"""One event, one verdict: what the supervisor has said of a run stands in the doctor's verdict on it.

Pure. Invariant: the doctor names another cause than the supervisor only where it has better evidence, and
then both are said.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from firstlight.doctor.case.evidence import Seen
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_process import SupervisorVerdict
from firstlight.doctor.case.view import View
from firstlight.doctor.finding import Finding
from firstlight.doctor.hypothesis import Clue, Condition, Grade, Weight, same
from firstlight.doctor.motion.states import GONE

_GRADES = list(Grade)
_TROUBLE = (Condition.STUCK, Condition.DEAD)


def word_of_supervisor(view: View) -> Seen[SupervisorVerdict] | None:
    """The verdict that stood in the latest look."""
    return view.case.seen(SupervisorVerdict, RUN, view.case.last_look)


def has_ended(view: View, seen: Seen[SupervisorVerdict]) -> bool:
    """Whether the verdict is on something that does not come back."""
    return not seen.value.is_stall or all(motion.state in GONE for motion in view.ranks or view.workers)


def cite(view: View, chosen: Finding, depths: Mapping[str, int]) -> Finding:
    """The finding with the supervisor's verdict. `depths` of the causes, see `hypothesis.Card`."""
    seen = word_of_supervisor(view)
    if seen is None:
        return chosen
    clue = Clue(text=f"its supervisor's verdict: {seen.value.message}", evidence=(seen.id,))
    clue = msgspec.structs.replace(clue, weight=Weight.STRONG)
    # What is no cause but the want of one ("all have ended, and none left a word") is answered by the word.
    supports = (*chosen.supports, clue) if chosen.cause in depths else (clue,)
    with_clue = msgspec.structs.replace(chosen, supports=supports)
    is_root = depths.get(chosen.cause) == 0 and chosen.condition in _TROUBLE
    if has_ended(view, seen):
        return _of_an_end(with_clue, seen.value, is_root=is_root)
    return _of_a_stall(with_clue, seen.value, is_known=chosen.cause in depths)


def _of_an_end(chosen: Finding, said: SupervisorVerdict, *, is_root: bool) -> Finding:
    """The supervisor saw it end; a cause at the root says why."""
    if is_root and chosen.cause != said.cause:
        summary = f"{said.message} {chosen.summary}"
        return msgspec.structs.replace(chosen, condition=Condition.DEAD, summary=summary)
    return _adopted(chosen, said, Condition.DEAD, said.cause or chosen.cause)


def _of_a_stall(chosen: Finding, said: SupervisorVerdict, *, is_known: bool) -> Finding:
    """Who looks for longer may know better; but a server that refuses requests is not healthy."""
    if chosen.condition in _TROUBLE and (
        chosen.cause == said.cause or (is_known and not _is_surer(said, chosen))
    ):
        return chosen
    return _adopted(chosen, said, Condition.STUCK, said.cause or chosen.cause)


def _is_surer(said: SupervisorVerdict, chosen: Finding) -> bool:
    grade = _grade(said)
    return _GRADES.index(grade) < _GRADES.index(chosen.grade)


def _grade(said: SupervisorVerdict) -> Grade:
    """A process that has ended was its child: there is nothing to doubt."""
    if not said.is_stall:
        return Grade.PROVED
    return next((grade for grade in Grade if grade.value == said.grade), Grade.SUSPECTED)


def _adopted(chosen: Finding, said: SupervisorVerdict, condition: Condition, cause: str) -> Finding:
    return msgspec.structs.replace(
        chosen,
        condition=condition,
        cause=cause,
        grade=_grade(said),
        subject=said.subject or chosen.subject,
        summary=said.message,
        remedies=same(said.hint or "nothing."),
    )
