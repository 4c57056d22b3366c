"""One examination of a run by the doctor, as the supervisor's watch wants it told.

The doctor with all its rules costs half a second and 20 MB, and most runs never need it: whoever wants this
imports it then. Invariant: nothing is remembered from one examination to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from firstlight.base.errors import EngineError
from firstlight.base.failure import Failure
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import Target
from firstlight.doctor.case.view import View
from firstlight.doctor.collect.registry import QUICK
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.hypothesis import Condition, Grade
from firstlight.doctor.motion.motion import ServerMotion, judge_motion
from firstlight.doctor.motion.states import FATAL, State, Thresholds
from firstlight.doctor.motion.waits import WaitGraph, wait_graph
from firstlight.doctor.report import describe
from firstlight.doctor.verdict import UNKNOWN, judge_view
from firstlight.launch.events import Stalled
from firstlight.launch.processes.commands import API

# The supervisor's word on an engine that stands still: the doctor's verdict as one message and one remedy.
# The message names a process, where it is and what was seen of it; what is not known is not said.
_STOPPED = "process-stopped"
_STUCK = (*FATAL, State.BLOCKED, State.SPINNING)


def stalled(case: Case, motion: ServerMotion, graph: WaitGraph, *, is_final: bool = False) -> Stalled | None:
    """The verdict, or None when the doctor does not call it stuck. `is_final`: an engine that stands still is
    ended, also while it serves.
    """
    if motion.state not in _STUCK:
        return None
    view = View(case, motion, graph)
    verdict = judge_view(view)
    if view.suspect is None or verdict.condition not in (Condition.STUCK, Condition.DEAD):
        return None
    parts = [verdict.summary.rstrip(".")]
    frames = describe.stack(view, view.suspect.key)
    if frames and frames not in verdict.summary:
        parts.append(f"the main thread of {describe.title(view.suspect.key)} is in {frames}")
    waiters = [edge for edge in graph.edges if edge.holder == view.suspect.key and edge.why not in parts[0]]
    parts += [f"{describe.title(edge.waiter)} waits for it: {edge.why}" for edge in waiters[:3]]
    hint = verdict.remedy
    if verdict.cause == _STOPPED and (is_final or view.is_starting or view.suspect.key == API):
        # A start that stalls is ended, and an api process that stands still loses the port and its life.
        hint = (
            "it is ended: find out who stopped it (a debugger, job control, `kill -STOP`), and start again."
        )
    if verdict.grade is not Grade.PROVED:
        run = case.target.run_dir
        look = f"`firstlight doctor --run {run}` says more, `firstlight blackbox` what came before."
        hint = look if verdict.cause == UNKNOWN else f"{hint} {look}"
    failure = Failure(f"{'; '.join(parts)}.", hint, EngineError.exit_code)
    return Stalled(failure, view.suspect.key, verdict.cause, verdict.grade.value)


def is_proven(motion: ServerMotion) -> bool:
    """Whether one look is enough: who is stopped or dead does not come back by itself."""
    return motion.state in FATAL


class Examined(NamedTuple):
    """`verdict` None: it is not stuck. `has_moved`: something was seen to move, or nothing is to be done."""

    verdict: Stalled | None
    is_proven: bool
    has_moved: bool


def examine_run(
    target: Target, thresholds: Thresholds, quiet_s: Mapping[str, float], *, is_final: bool = False
) -> Examined:
    """Two looks, seconds apart. `quiet_s`: for how long each process has shown no sign of life; `is_final`:
    who is found stuck is ended.
    """
    case = examine(Scene(target), QUICK)
    motion = judge_motion(case, thresholds, dict(quiet_s))
    has_moved = motion.state is State.IDLE or any(one.progress for one in motion.processes)
    return Examined(stalled(case, motion, wait_graph(case), is_final=is_final), is_proven(motion), has_moved)
