"""Processes that are dead or stopped: the first question of all, as everyone else then only waits.

Invariant: a death is called "for want of memory" only with the kernel's word for it.
"""

from __future__ import annotations

from firstlight.doctor.case.evidence import Seen
from firstlight.doctor.case.target import Role
from firstlight.doctor.case.values_host import Tree
from firstlight.doctor.case.values_process import ExitRecord, ProcessState
from firstlight.doctor.case.view import View
from firstlight.doctor.hypothesis import (
    Card,
    Clue,
    Condition,
    Hypothesis,
    Judgement,
    Look,
    Remedies,
    Weight,
    same,
)
from firstlight.doctor.motion.motion import ProcessMotion, State
from firstlight.doctor.motion.states import GONE
from firstlight.doctor.report import describe
from firstlight.doctor.servers.procfs import TICKS_PER_S

_SPAWN_S = 3.0  # within which a launcher has started all of its ranks


def _stopped(view: View) -> Judgement | None:
    stopped = view.motion.with_state(State.STOPPED)
    if not stopped:
        return None
    one = stopped[0]
    value = view.case.of(ProcessState, one.key)
    tracer = value.tracer_pid if value else 0
    who = f"the tracer with pid {tracer}" if tracer else "a signal (SIGSTOP or SIGTSTP)"
    waiters = [edge for edge in view.graph.edges if edge.holder == one.key]
    return Judgement(
        supports=(
            Clue(text="; ".join(one.reasons), evidence=one.evidence, weight=Weight.PROOF),
            *(Clue(text=edge.why, evidence=edge.evidence) for edge in waiters[:3]),
        ),
        subject=one.key,
        summary=f"{describe.named(view, one.key)} is stopped{describe.where(view, one.key)}: by {who}.",
        fills={"resume": f"gdb -p {tracer} must detach" if tracer else f"kill -CONT {view.pid(one.key)}"},
    )


STOPPED = Hypothesis(
    Card(
        cause="process-stopped",
        title="a process is stopped by a signal or held by a debugger",
        condition=Condition.STUCK,
        signs=("state T or t in /proc/PID/stat in two looks", "its TracerPid, if a debugger holds it"),
        vetoes=("no process is in state T or t",),
        next_test="let it go on and see whether the others follow: `{resume}`.",
        remedies=same("let it go on: `{resume}`."),
        looks=(Look.RANKS,),
    ),
    _stopped,
)


def dead_ones(view: View) -> list[ProcessMotion]:
    """Those that are gone or zombies, of the ones that matter."""
    return [
        motion
        for motion in view.motion.with_state(*GONE)
        if motion.role not in (Role.HELPER, Role.COMPILER, Role.JANITOR)
    ]


def _record(view: View, key: str) -> Seen[ExitRecord] | None:
    return view.case.seen(ExitRecord, key)


def untold_ends(view: View) -> list[Seen[ExitRecord]]:
    """Ends that nobody had asked for."""
    return [
        seen
        for seen in view.case.all(ExitRecord)
        if not seen.value.was_told and (seen.value.signal or seen.value.code)
    ]


def _died(view: View) -> Judgement | None:
    dead, records = dead_ones(view), untold_ends(view)
    missing = _is_short_of_ranks(view)
    if not dead and not records and not missing:
        if view.case.target.is_complete and view.motion.living_ranks == view.motion.expected_ranks:
            text = f"all {view.motion.living_ranks} ranks are alive"
            return Judgement(vetoes=(Clue(text=text, evidence=view.motion.evidence[:4]),))
        return Judgement(summary="a rank may have died without anybody taking note.")
    supports = [Clue(text="; ".join(one.reasons), evidence=one.evidence, weight=Weight.PROOF) for one in dead]
    subject = dead[0].key if dead else records[0].subject if records else None
    supports += [
        Clue(text=_how(seen.value), evidence=(seen.id,), weight=Weight.PROOF)
        for seen in sorted(records, key=lambda seen: seen.subject != subject)
    ]
    first = next((seen for seen in records if seen.value.signal), records[0] if records else None)
    subject = first.subject if first else subject
    if missing and not supports:
        numbers = {one.rank for one in view.ranks} - {None}
        lost = sorted(set(range(view.motion.expected_ranks or 0)) - numbers)
        subject = f"rank-{lost[0]}" if lost and len(numbers) == len(view.ranks) else None
        text = (
            f"{view.motion.living_ranks} of {view.motion.expected_ranks} ranks are alive "
            f"({view.case.target.expected_from}), long after all of them were started"
        )
        ids = tuple(seen.id for seen in view.case.all(Tree))
        # Where the others wait for it at the rendezvous, that is the better name: it may never have lived.
        is_awaited = any(view.in_stack(r"rendezvous", r"init_process_group", innermost=12))
        weight = Weight.STRONG if is_awaited else Weight.PROOF
        supports.append(Clue(text=text, evidence=ids, weight=weight))
    name = describe.named(view, subject) if subject else "a rank"
    how = f": {_how(first.value)}" if first else ""
    return Judgement(
        supports=tuple(supports),
        subject=subject,
        summary=f"{name} has ended{describe.where(view, subject) if subject else ''}{how}.",
    )


def _is_short_of_ranks(view: View) -> bool:
    """Fewer ranks than there should be, though their launcher is done with starting them."""
    target, expected = view.case.target, view.motion.expected_ranks
    ticks = [process.start_ticks for process in target.ranks]
    if not target.is_complete or expected is None or view.motion.living_ranks >= expected or not ticks:
        return False
    if not view.is_starting:
        return True
    youngest_s = (
        target.started_wall_s + (max(ticks) - min(p.start_ticks for p in target.processes)) / TICKS_PER_S
    )
    return bool(view.case.evidence) and view.case.evidence[-1].time_s - youngest_s > _SPAWN_S


def _how(record: ExitRecord) -> str:
    if record.signal:
        return f"{record.name} ended by signal {record.signal}"
    words = f": {record.message[:200]}" if record.message else ""
    return f"{record.name} ended with exit code {record.code}{words}"


DIED = Hypothesis(
    Card(
        cause="rank-died",
        prior=5,
        title="a rank has ended, and the others wait for it",
        condition=Condition.DEAD,
        signs=(
            "a zombie, or a black box whose writer has ended",
            "an exit record with a signal or a code that nobody asked for",
            "fewer living ranks, or fewer `Load weight end` lines, than the parallel size",
        ),
        vetoes=("all expected ranks are alive",),
        next_test="the last lines of *that* rank's log, and how it ended.",
        remedies=Remedies(
            native="read `{run}/*.log` and start again; `--on-stall restart` does so by itself.",
            vllm="run with VLLM_LOGGING_LEVEL=DEBUG and read the first error above `See root cause above`.",
            sglang="read the log of that rank above `scheduler died`; watch every rank, not rank 0 alone.",
        ),
        looks=(Look.RANKS, Look.EXITS, Look.LOGS),
        depth=1,
    ),
    _died,
)
HYPOTHESES = (STOPPED, DIED)
