"""Too little of the machine: memory for the page cache, processors.

Invariant: pressure explains slowness only; it is never called stuck.
"""

from __future__ import annotations

from firstlight.doctor.case.values_host import CgroupMemory, Pressure
from firstlight.doctor.case.view import View
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Weight, same
from firstlight.doctor.motion.motion import State
from firstlight.doctor.motion.progress import processor_use

_MIN_WANTED_CORES = 0.3


def _thrash(view: View) -> Judgement | None:
    clues = []
    for seen in view.case.all(CgroupMemory, look=view.case.last_look):
        before = next(
            (s for s in view.case.all(CgroupMemory, look=0) if s.value.path == seen.value.path), None
        )
        now, then = seen.value.file_refaults, before.value.file_refaults if before else None
        limit, used = seen.value.max_bytes, seen.value.current_bytes
        if before is None or now is None or then is None or limit is None or used is None:
            continue
        if now - then > 100 and used > limit * 0.95:
            text = f"{now - then} pages were read again between the looks, at {used / limit:.0%} of the limit"
            clues.append(Clue(text=text, evidence=(before.id, seen.id), weight=Weight.STRONG))
    for pressure in view.case.all(Pressure, look=view.case.last_look):
        memory = pressure.value.memory
        if memory is not None and memory.full_percent > 5:
            text = f"all tasks waited for memory {memory.full_percent:.0f} % of the time"
            clues.append(Clue(text=text, evidence=(pressure.id,), weight=Weight.SOME))
    if not any(clue.weight is Weight.STRONG for clue in clues):
        return None
    return Judgement(supports=tuple(clues))


THRASH = Hypothesis(
    Card(
        cause="page-cache-thrash",
        title="the page cache is too small for the checkpoint: pages are read again and again",
        condition=Condition.SLOW,
        signs=(
            "workingset_refault_file of the control group rises, memory.current is at its limit",
            "memory pressure `full` above zero",
        ),
        vetoes=("no pressure and no refaults",),
        next_test="`cat /sys/fs/cgroup/.../memory.{{stat,pressure}}` twice.",
        remedies=same("raise the memory limit of the container, or let fewer ranks load at once."),
        looks=(Look.MEMORY, Look.BYTES),
    ),
    _thrash,
)


def _starved(view: View) -> Judgement | None:
    if view.motion.state not in (State.MOVING, State.SLOW, State.UNCLEAR) or not view.is_starting:
        return None
    queued = [one for one in view.workers if _is_queued(view, one.key)]
    if not queued:
        return None  # the host is crowded, but that is not what this server waits for
    clues = [
        Clue(
            text=f"tasks waited for a processor {seen.value.cpu.some_percent:.0f} % of the last 10 s",
            evidence=(seen.id,),
            weight=Weight.STRONG,
        )
        for seen in view.case.all(Pressure, look=view.case.last_look)
        if seen.value.cpu is not None and seen.value.cpu.some_percent > 60 and seen.value.scope == "host"
    ]
    return Judgement(supports=tuple(clues[:1])) if clues else None


def _is_queued(view: View, key: str) -> bool:
    """Whether a process waits for a processor for about as long as it has one."""
    use = processor_use(view.case, key)
    return use is not None and use.wanted > _MIN_WANTED_CORES and use.cores < 0.6 * use.wanted


STARVED = Hypothesis(
    Card(
        cause="processor-starved",
        title="others use the processors: everything takes longer",
        condition=Condition.SLOW,
        signs=(
            "its threads wait for a processor as long as they have one (schedstat)",
            "cpu pressure above 60 %",
        ),
        vetoes=("no pressure",),
        next_test="`top`: who uses them; `cat /proc/pressure/cpu`.",
        remedies=same("wait, end the others, or give it cores of its own (`taskset`, a container's cpuset)."),
        looks=(Look.MOTION,),
        depth=2,
    ),
    _starved,
)


HYPOTHESES = (THRASH, STARVED)
