"""Processes that are dead or stopped: the first question of all, as everyone else then only waits.

Read by `registry`. Invariant: a death is called "for want of memory" only with the kernel's word for it.
"""

from __future__ import annotations

import re

from firstlight.doctor import describe
from firstlight.doctor.evidence import Seen
from firstlight.doctor.hypotheses.texts import stated
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
from firstlight.doctor.motion import ProcessMotion, State
from firstlight.doctor.target import Role
from firstlight.doctor.values_device import KernelLog
from firstlight.doctor.values_host import CgroupMemory, Tree
from firstlight.doctor.values_process import ExitRecord, ProcessState
from firstlight.doctor.view import View

_DEAD = (State.DEAD, State.ZOMBIE)
_MEMORY_WORDS = (
    r"MemoryError",
    r"Cannot allocate memory",
    r"can't allocate memory",
    r"std::bad_alloc",
    r"failed to map segment from shared object",
)
_KILL = 9
_OOM_LINE = re.compile(r"Killed process (\d+)")
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


def _dead(view: View) -> list[ProcessMotion]:
    return [
        motion
        for motion in view.motion.with_state(*_DEAD)
        if motion.role not in (Role.HELPER, Role.COMPILER, Role.JANITOR)
    ]


def _record(view: View, key: str) -> Seen[ExitRecord] | None:
    return view.case.seen(ExitRecord, key)


def _untold(view: View) -> list[Seen[ExitRecord]]:
    """Ends that nobody had asked for."""
    return [
        seen
        for seen in view.case.all(ExitRecord)
        if not seen.value.was_told and (seen.value.signal or seen.value.code)
    ]


def _oom_growth(view: View) -> Clue | None:
    """The kernel's count of OOM kills in a control group of the server, since the group was made."""
    for seen in view.case.all(CgroupMemory):
        if seen.value.oom_kills:
            text = f"{seen.value.oom_kills} OOM kills in control group {seen.value.path}"
            weight = Weight.STRONG if seen.value.path != "/" else Weight.SOME
            return Clue(text=text, evidence=(seen.id,), weight=weight, group="oom")
    return None


def _kernels_word(view: View) -> tuple[Clue, str] | None:
    """A line of the kernel's log that names a process of the server."""
    for seen in view.case.all(KernelLog):
        for line in reversed(seen.value.lines):
            match = _OOM_LINE.search(line)
            key = next((k for k in view.case.subjects if match and view.pid(k) == int(match[1])), None)
            if key is not None and (one := view.motion.of(key)) is not None and one.state in _DEAD:
                text = f"the kernel's log: {line[:160]}"
                return Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF, group="oom"), key
    return None


def _oom(view: View) -> Judgement | None:
    records = _untold(view)
    dead = _dead(view)
    if kernel := _kernels_word(view):
        clue, killed = kernel
        name = describe.named(view, killed)
        summary = f"the kernel killed {name} for want of memory{describe.where(view, killed)}."
        return Judgement(supports=(clue,), subject=killed, summary=summary)
    if not dead and not records and view.motion.living_ranks == view.motion.expected_ranks:
        veto = Clue(text="all ranks are alive", evidence=view.motion.evidence[:4])
        return Judgement(vetoes=(veto,))
    supports: list[Clue] = []
    subject: str | None = None
    for seen in records:
        if seen.value.is_oom:
            text = f"{seen.value.name} was killed by signal 9 while the kernel counted an OOM kill"
            supports.append(Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF))
            subject = seen.subject
        elif seen.value.signal == _KILL and seen.value.is_oom is None:
            text = f"{seen.value.name} was killed by signal 9, and nothing tells by whom"
            supports.append(Clue(text=text, evidence=(seen.id,), weight=Weight.WEAK))
            subject = subject or seen.subject
    growth = _oom_growth(view)
    line = view.find_line(r"Out of memory: Killed process", r"oom-kill:", r"exit code -9", r"signal 9")
    if line and not supports:
        supports.append(Clue(text=line.text[:200], evidence=(line.evidence,), weight=Weight.WEAK))
    denied = [seen for seen in records if seen.value.signal == _KILL and seen.value.is_oom is False]
    if denied and not any(seen.value.is_oom for seen in records):
        text = "killed by signal 9, but the kernel counted no OOM kill"
        return Judgement(vetoes=(Clue(text=text, evidence=(denied[0].id,)),))
    if growth and (supports or dead):
        supports.append(growth)
    subject = subject or (dead[0].key if dead else None)
    name = describe.title(subject) if subject else "a rank"
    return Judgement(
        supports=tuple(supports),
        subject=subject,
        summary=f"the kernel killed {name} for want of memory.",
    )


OOM = Hypothesis(
    Card(
        cause="oom-killed",
        title="the kernel killed a process for want of memory",
        condition=Condition.DEAD,
        signs=(
            "oom_kill of the control group's memory.events rose",
            "the process ended by signal 9 that nobody of ours sent",
            "fewer ranks than expected, the others in a pipe read or a collective",
        ),
        vetoes=("all ranks are alive", "signal 9 with no OOM kill counted"),
        next_test="`cat /sys/fs/cgroup/.../memory.events`; `journalctl -k | grep -i 'killed process'`.",
        remedies=Remedies(
            native="lower `--memory-fraction`, `--kv-memory` or `--max-model-len`, or give it more memory.",
            vllm="lower `--max-model-len` or `--cpu-offload-gb`, load with fewer workers "
            "(`--max-parallel-loading-workers 1`), MAX_JOBS=2 while kernels are compiled.",
            sglang="lower `--mem-fraction-static`, leave out `--enable-hierarchical-cache` and "
            "`--cpu-offload-gb`, MAX_JOBS=2 while kernels are compiled.",
        ),
        looks=(Look.RANKS, Look.EXITS, Look.MEMORY),
    ),
    _oom,
)


def _memory(view: View) -> Judgement | None:
    found = stated(view, *_MEMORY_WORDS)
    if found is None:
        return None
    clue, subject = found
    name = describe.title(subject) if subject else "a process"
    return Judgement(supports=(clue,), subject=subject, summary=f"{name} was refused memory and ended.")


MEMORY_LIMIT = Hypothesis(
    Card(
        cause="memory-limit",
        title="a process was refused memory (a limit, not the OOM killer) and ended",
        condition=Condition.DEAD,
        signs=("MemoryError or 'Cannot allocate memory' among its last words", "RLIMIT_AS or RLIMIT_DATA"),
        vetoes=("no such words",),
        next_test="`grep -E 'address space|data size' /proc/PID/limits`; `ulimit -v` in the shell.",
        remedies=same(
            "raise the limit (`ulimit -v unlimited`, LimitAS= in the unit), or ask for less memory."
        ),
        looks=(Look.EXITS, Look.LOGS),
    ),
    _memory,
)


def _died(view: View) -> Judgement | None:
    dead, records = _dead(view), _untold(view)
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
    youngest_s = target.started_wall_s + (max(ticks) - min(p.start_ticks for p in target.processes)) / 100
    return bool(view.case.evidence) and view.case.evidence[-1].time_s - youngest_s > _SPAWN_S


def _how(record: ExitRecord) -> str:
    if record.signal:
        return f"{record.name} ended by signal {record.signal}"
    words = f": {record.message[:200]}" if record.message else ""
    return f"{record.name} ended with exit code {record.code}{words}"


DIED = Hypothesis(
    Card(
        cause="rank-died",
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
            native="read `{run}/logs` and start again; `--on-stall restart` does so by itself.",
            vllm="run with VLLM_LOGGING_LEVEL=DEBUG and read the first error above `See root cause above`.",
            sglang="read the log of that rank above `scheduler died`; watch every rank, not rank 0 alone.",
        ),
        looks=(Look.RANKS, Look.EXITS, Look.LOGS),
        depth=1,
    ),
    _died,
)
HYPOTHESES = (STOPPED, OOM, MEMORY_LIMIT, DIED)
