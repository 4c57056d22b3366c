"""Waits for a lock: of a file, of a full pipe, of another thread, of Python's interpreter.

Invariant: who holds a lock is said only where the kernel or the interpreter says so.
"""

from __future__ import annotations

import re

from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import FileLock, FileLocks, Pipes
from firstlight.doctor.case.values_process import (
    Descriptors,
    Frame,
    PythonStacks,
    StackThread,
    ThreadState,
)
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import waits_for_gpu
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Weight, same
from firstlight.doctor.motion.motion import State
from firstlight.doctor.motion.wait_signatures import full_pipe_writers, same_wait
from firstlight.doctor.report import describe

_POLLING = (r"filelock.*:.*acquire", r"fasteners/.*:.*acquire", r"portalocker/.*:.*acquire")
_ACQUIRES = re.compile(r"\bwith\b.*(lock|mutex|sem)|\.acquire\(", re.IGNORECASE)
_LIBRARY = re.compile(r"(^|/)(threading|queue|_base|thread|process|selectors|connection)\.py$")


def _file_lock(view: View) -> Judgement | None:
    seen = view.case.seen(FileLocks, RUN)
    for edge in view.graph.edges:
        if edge.kind == "flock":
            lock = _lock_of(seen.value, edge.holder, edge.waiter) if seen else None
            clue = Clue(text=edge.why, evidence=edge.evidence, weight=Weight.PROOF)
            return _held(view, edge.waiter, edge.holder, lock, clue)
    polling = next(view.in_stack(*_POLLING, innermost=6), None)
    if polling is None or seen is None:
        return None
    text = f"{polling.key} polls for a file lock ({polling.frame.function}, {polling.frame.file})"
    clue = Clue(text=text, evidence=(polling.evidence, seen.id), weight=Weight.STRONG)
    ours = [process.key for process in view.case.target.processes]
    others = [lock for lock in seen.value.locks if lock.holder not in ours]
    if others:
        return _held(view, polling.key, others[0].holder, others[0], clue)
    return Judgement(
        supports=(clue,),
        contradicts=() if view.has_stopped_moving else (Clue(text="it still moves", evidence=clue.evidence),),
        subject=polling.key,
        summary=f"{describe.named(view, polling.key)} polls for a file lock in {polling.frame.file}; who "
        "holds it cannot be told from here, as it opens the file for each try only.",
        fills={"holder": "HOLDER", "path": "the lock file"},
    )


def _lock_of(locks: FileLocks, holder: str, waiter: str) -> FileLock | None:
    return next((lock for lock in locks.locks if lock.holder == holder and waiter in lock.waiters), None)


def _held(view: View, waiter: str, holder: str, lock: FileLock | None, clue: Clue) -> Judgement:
    where = lock.path if lock and lock.path else "a file"
    inherited = ""
    if lock is not None and not lock.is_taker_alive:
        inherited = f", which it has from pid {lock.taker_pid}, that is dead: it inherited the descriptor"
    pid = lock.holder_pid if lock else view.pid(holder)
    return Judgement(
        supports=(clue,),
        contradicts=() if view.has_stopped_moving else (Clue(text="it still moves", evidence=clue.evidence),),
        subject=waiter,
        summary=f"{describe.named(view, waiter)} waits for the lock on {where}, which "
        f"{describe.named(view, holder)} holds{inherited}.",
        fills={"holder": str(pid), "path": where},
    )


FILE_LOCK = Hypothesis(
    Card(
        cause="file-lock-held",
        title="a file lock that another process holds",
        condition=Condition.STUCK,
        signs=(
            "/proc/locks: a waiter of ours behind a holder",
            "or a stack in a lock that polls (`filelock`), and a holder of a file it has open",
            "the holder may have inherited the descriptor from a process that is dead",
        ),
        vetoes=("nobody waits for a file lock",),
        next_test="what the holder is doing: `py-spy dump --pid {holder}` or `ls -l /proc/{holder}/fd`.",
        remedies=same("let the holder finish, or end it: `kill {holder}`. Never delete {path} under it."),
        looks=(Look.LOCKS, Look.STACKS),
    ),
    _file_lock,
)


def _pipe_full(view: View) -> Judgement | None:
    pipes = view.case.seen(Pipes, RUN)
    for key in view.case.subjects:
        for ids, thread in full_pipe_writers(view.case, key):
            descriptors = view.case.seen(Descriptors, key)
            fd = thread.fd
            open_ = descriptors.value.inode_of(fd) if descriptors and fd is not None else None
            found = pipes.value.pipes if pipes else ()
            pipe = next((one for one in found if open_ and one.inode == open_.inode), None)
            readers = ", ".join(name for name in pipe.readers if name != key) if pipe else ""
            stream = {1: "its standard output", 2: "its standard error"}.get(fd or -1, "a pipe")
            whom = f"whose reader {readers} does not read" if readers else "that nobody reads"
            text = f"thread {thread.tid} of {key} is inside a write to {stream} in two looks"
            seen = (*ids, *(one.id for one in (descriptors, pipes) if one is not None))
            return Judgement(
                supports=(Clue(text=text, evidence=seen, weight=Weight.PROOF),),
                subject=key,
                summary=f"{describe.named(view, key)} is blocked in a write to {stream}, a full pipe {whom}.",
                fills={"fd": str(fd if fd is not None else 2)},
            )
    return None


PIPE = Hypothesis(
    Card(
        cause="pipe-full",
        title="a process writes to a full pipe that nobody reads",
        condition=Condition.STUCK,
        signs=("a thread inside write() on a pipe (wchan pipe_write) in two looks",),
        vetoes=("no thread is inside a write to a pipe",),
        next_test="read the pipe once: `timeout 2 cat /proc/{pid}/fd/{fd}`, or see who should.",
        remedies=same(
            "read the pipe, or send the output to a file (`> server.log 2>&1`); a parent that takes output "
            "must drain it in a thread."
        ),
        looks=(Look.RANKS, Look.SOCKETS),
    ),
    _pipe_full,
)


def _lock_deadlock(view: View) -> Judgement | None:
    for one in view.workers:
        if one.state not in (State.BLOCKED, State.UNCLEAR):
            continue
        waits = _lock_waits(view, one.key)
        if len(waits) < 2:
            continue
        pair = view.case.pair(PythonStacks, one.key)
        ids = pair.ids if pair else ()
        texts = [
            f"{thread.name or thread.tid} in `{frame.text}` ({frame.file}:{frame.line})"
            for thread, frame in waits
        ]
        clue = Clue(text=f"the same in two looks: {'; '.join(texts)}", evidence=ids, weight=Weight.STRONG)
        return Judgement(
            supports=(clue, Clue(text="; ".join(one.reasons), evidence=one.evidence)),
            subject=one.key,
            summary=f"threads of {describe.named(view, one.key)} wait for each other: {'; '.join(texts)}.",
        )
    return None


def _lock_waits(view: View, key: str) -> list[tuple[StackThread, Frame]]:
    """Threads that are at the same acquisition in both looks; waits inside the library's queues are none."""
    pair = view.case.pair(PythonStacks, key)
    if pair is None:
        return []
    before = {thread.tid: thread.frames for thread in pair.first.value.threads}
    found = []
    for thread in pair.second.value.threads:
        frame = thread.frames[0] if thread.frames else None
        if frame is None or _LIBRARY.search(frame.file) or not _ACQUIRES.search(frame.text):
            continue
        if before.get(thread.tid, ())[:3] == thread.frames[:3]:
            found.append((thread, frame))
    return found


LOCK_DEADLOCK = Hypothesis(
    Card(
        cause="lock-deadlock",
        title="threads of one process wait for each other's locks",
        condition=Condition.STUCK,
        signs=("two or more threads at the acquisition of a lock, at the same line in two looks",),
        vetoes=("fewer than two threads wait for a lock",),
        next_test="`py-spy dump --locals --pid {pid}` shows which locks they are.",
        remedies=same(
            "keep a bundle, end it (`kill {pid}`) and report the two stacks to whose code they are."
        ),
        looks=(Look.STACKS, Look.MOTION),
    ),
    _lock_deadlock,
)


def _gil(view: View) -> Judgement | None:
    for one in view.workers:
        pair = view.case.pair(PythonStacks, one.key)
        if pair is None or one.state not in (State.BLOCKED, State.SPINNING, State.UNCLEAR):
            continue
        before = {thread.tid: thread for thread in pair.first.value.threads if thread.owns_gil}
        wait = same_wait(view.case, one.key)
        if wait is not None:  # Python lets go of the lock before it reads; the last owner is shown on
            before.pop(wait.second.value.tid, None)
        for thread in pair.second.value.threads:
            earlier = before.get(thread.tid)
            if not thread.owns_gil or earlier is None or earlier.frames[:2] != thread.frames[:2]:
                continue
            state = _state_of(view, one.key, thread.tid)
            frame = thread.frames[0] if thread.frames else None
            place = f"{frame.function} ({frame.file}:{frame.line})" if frame else "code without Python frames"
            asleep = state is not None and state.state == "S"
            if not asleep and one.state is State.UNCLEAR:
                continue  # it runs Python, as it should
            text = f"thread {thread.tid} owns the GIL in both looks, in {place}"
            if asleep and state is not None:
                text += f", and sleeps in {state.syscall or state.wchan or 'the kernel'}"
            weight = Weight.PROOF if asleep else Weight.STRONG
            return Judgement(
                supports=(Clue(text=text, evidence=pair.ids, weight=weight),),
                subject=one.key,
                summary=f"{describe.named(view, one.key)}: C code called from {place} holds the "
                "interpreter's lock (GIL) and does not return; all other threads of it wait.",
            )
    return None


def _state_of(view: View, key: str, tid: int) -> ThreadState | None:
    found = view.threads(key)
    return found[1].get(tid) if found else None


GIL = Hypothesis(
    Card(
        cause="gil-held",
        title="C code holds Python's interpreter lock and does not return",
        condition=Condition.STUCK,
        signs=(
            "py-spy: the same thread owns the GIL at the same line in two looks, and sleeps or spins in C",
        ),
        vetoes=("no thread owns the GIL in both looks",),
        next_test="`py-spy dump --native --pid {pid}` names the C function.",
        remedies=same(
            "keep a bundle, end the process (`kill -9 {pid}`), and report the C function to its owner."
        ),
        looks=(Look.STACKS,),
    ),
    _gil,
)


def _spinning(view: View) -> Judgement | None:
    spinning = view.motion.with_state(State.SPINNING)
    if not spinning:
        return None
    one = spinning[0]
    frames = describe.stack(view, one.key)
    clues = [Clue(text="; ".join(one.reasons), evidence=one.evidence, weight=Weight.STRONG)]
    if frames and (pair := view.case.pair(PythonStacks, one.key)):
        clues.append(Clue(text=f"its main thread is in {frames}", evidence=pair.ids))
    waits = waits_for_gpu(view, one.key)
    return Judgement(
        supports=tuple(clues),
        contradicts=(waits,) if waits else (),
        subject=one.key,
        summary=f"{describe.named(view, one.key)} {describe.state(one)}{describe.where(view, one.key)}"
        f"{f'; its main thread is in {frames}' if frames else ''}.",
    )


SPINNING = Hypothesis(
    Card(
        cause="spinning",
        title="a loop turns without a step of the engine",
        condition=Condition.STUCK,
        signs=(
            "half a core or more in two looks, for three times what a step takes, and nothing useful moves",
        ),
        vetoes=("a step, bytes, pages or a compiler moves",),
        next_test="`py-spy record --pid {pid} --duration 5 -o spin.svg` shows the loop.",
        remedies=same("keep a bundle, end the process (`kill {pid}`) and report the stack."),
        looks=(Look.MOTION, Look.STACKS),
        depth=2,
    ),
    _spinning,
)
HYPOTHESES = (FILE_LOCK, PIPE, LOCK_DEADLOCK, GIL, SPINNING)
