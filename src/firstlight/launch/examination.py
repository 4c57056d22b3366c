"""One examination of a run by the doctor, as the supervisor's watch wants it told.

Imported by `watch` when the first one is due: the doctor with all its rules costs half a second and 20 MB,
and most runs never need it. Invariant: nothing is remembered from one examination to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from firstlight.doctor.collect.registry import QUICK
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.motion import judge_motion
from firstlight.doctor.states import State, Thresholds
from firstlight.doctor.target import Target
from firstlight.doctor.waits import wait_graph
from firstlight.launch.events import Stalled
from firstlight.launch.stall import is_proven, stalled


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
