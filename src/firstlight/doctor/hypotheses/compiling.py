"""Kernels compiled while the server starts: slow and healthy, locked for ever, or killed.

Invariant: while a compiler of the run works, nobody is called stuck for waiting on it.
"""

from __future__ import annotations

from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import Compilers, JitLocks, LockFile
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Weight, same
from firstlight.doctor.motion.motion import State
from firstlight.doctor.report import describe

_BATON = (r"file_baton\.py:.*wait",)


def _compiling(view: View) -> Judgement | None:
    seen = view.case.seen(Compilers, RUN)
    running = seen.value.running if seen else ()
    busy = [(one, item) for one in view.motion.processes for item in one.progress if item.what == "compilers"]
    if not busy or seen is None:
        if view.has_stopped_moving and seen is not None:
            return Judgement(vetoes=(Clue(text="no compiler is running", evidence=(seen.id,)),))
        return None
    one, item = busy[0]
    names = ", ".join(sorted({compiler.name for compiler in running})) or "a compiler"
    return Judgement(
        supports=(Clue(text=item.detail, evidence=item.evidence, weight=Weight.STRONG),),
        subject=one.key,
        condition=Condition.SLOW if view.is_starting else Condition.HEALTHY,
        summary=f"{describe.named(view, one.key)} compiles kernels ({names}): slow, not stuck.",
    )


COMPILING = Hypothesis(
    Card(
        cause="jit-compiling",
        title="kernels are being compiled: slow, not stuck",
        condition=Condition.SLOW,
        signs=("living compilers below a rank (ninja, nvcc, cicc, ptxas, cc1plus) that use a processor",),
        vetoes=("no compiler is running",),
        next_test="count the objects in the build folder against those in its build.ninja: that is the ETA.",
        remedies=same("wait; keep the cache folder between starts, so that the next one finds it warm."),
        looks=(Look.MOTION,),
    ),
    _compiling,
)


def _stale(view: View) -> Judgement | None:
    locks, compilers = view.case.seen(JitLocks, RUN), view.case.seen(Compilers, RUN)
    place = next(view.in_stack(*_BATON, innermost=8), None)
    batons = [lock for lock in locks.value.locks if lock.is_existence_lock] if locks else []
    free = [lock for lock in batons if not lock.openers]
    if compilers is not None and compilers.value.running:
        return Judgement(vetoes=(Clue(text="a compiler is running", evidence=(compilers.id,)),))
    clues = []
    if place is not None:
        text = f"{place.key} waits in {place.frame.function} ({place.frame.file}:{place.frame.line})"
        clues.append(Clue(text=text, evidence=(place.evidence,), weight=Weight.STRONG, group="stack"))
    if free and locks is not None:
        text = f"{free[0].path} exists, {_age(free[0])}, and no process has its folder open"
        is_proved = place is not None and compilers is not None
        weight = Weight.PROOF if is_proved else Weight.SOME
        clues.append(Clue(text=text, evidence=(locks.id,), weight=weight, group="lock"))
    if not clues:
        is_open = view.is_starting and view.motion.state is State.UNCLEAR and locks is None
        return Judgement(summary="a lock of a compile cache may be left over.") if is_open else None
    path = free[0].path if free else "the lock"
    subject = place.key if place else None
    who = describe.named(view, subject) if subject else "a rank"
    if place is None and view.motion.state in (State.MOVING, State.IDLE, State.SLOW):
        return None  # a leftover that nobody waits for
    return Judgement(
        supports=tuple(clues),
        subject=subject,
        summary=f"{who} waits for a lock file that nobody holds: {path}.",
        fills={"path": path},
    )


def _age(lock: LockFile) -> str:
    older = " (older than this launch)" if lock.is_older_than_launch else ""
    return f"{lock.age_s:.0f} s old{older}"


STALE = Hypothesis(
    Card(
        cause="stale-jit-lock",
        prior=3,
        title="a lock file of a compile cache that its builder left behind",
        condition=Condition.STUCK,
        signs=(
            "a stack in torch's `file_baton.wait` or a cache's file lock",
            "the lock file is there, nobody has its folder open, no compiler runs",
        ),
        vetoes=("a compiler runs", "the lock's holder is alive"),
        next_test="start once with a cache folder of its own: `TORCH_EXTENSIONS_DIR=$(mktemp -d)`.",
        remedies=same("when no build runs anywhere (also on other hosts that share it): `rm {path}`."),
        looks=(Look.STACKS, Look.LOCKS, Look.MOTION),
    ),
    _stale,
)


def _killed(view: View) -> Judgement | None:
    found = stated(
        view,
        r"FAILED: .*code=137",
        r"code=137",
        r"ninja: build stopped",
        r"Error building extension",
        r"Killed signal terminated program (cc1plus|cicc|ptxas)",
    )
    if found is None:
        return None
    clue, subject = found
    return Judgement(
        supports=(clue,),
        subject=subject,
        summary=f"a compile of kernels failed or was killed: {clue.text}.",
        condition=Condition.DEAD if view.motion.state in (State.DEAD, State.ZOMBIE) else Condition.STUCK,
    )


KILLED = Hypothesis(
    Card(
        cause="jit-killed",
        title="the compiler of the kernels was killed, mostly for want of memory",
        condition=Condition.DEAD,
        signs=("`FAILED: … code=137`, `ninja: build stopped`, an OOM kill counted",),
        vetoes=("no such words",),
        next_test="`journalctl -k | grep -i 'killed process'`; memory while nvcc runs (about 8 GB a job).",
        remedies=same("MAX_JOBS=2 (1 to 4) in the environment, or more memory; then start again."),
        looks=(Look.LOGS, Look.EXITS, Look.MEMORY),
    ),
    _killed,
)
HYPOTHESES = (KILLED, STALE, COMPILING)
