"""Patients that somebody stopped, and engines that stand still inside one process.

Listed by `kinds`. Invariant: the stop is found by its moment in the engine's own black box.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from firstlight.base.phases import DRAFTER, SELF_TEST
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_process import ProcessState, PythonStacks, Threads
from patients.models import SHARDED, TINY
from patients.native import SLOW_TO_JUDGE, Load, Ranks, Server, box, change, phase
from patients.patient import Kind, Patient, Unavailable, Ward, until

_STUCK = frozenset({"stuck"})
_STOPPED = frozenset({"process-stopped"})


def _is_stopped(key: str) -> object:
    def check(case: Case) -> bool:
        state = case.of(ProcessState, key)
        return state is not None and state.is_stopped

    return check


def _stopped_early(ward: Ward) -> Patient:
    """SIGSTOP between the first import and the rendezvous."""
    ranks = Ranks(ward, ward.models / TINY, 2)
    pid = ranks.pid("rank-1")
    after_s = ward.random.uniform(0.0, 2.5)
    time.sleep(after_s)
    os.kill(pid, signal.SIGSTOP)
    return ranks.patient(f"{after_s:.1f} s after its box was opened")


def _stopped_late(ward: Ward) -> Patient:
    """SIGSTOP when the weights are there, and before a token was made."""
    ranks = Ranks(ward, ward.models / SHARDED, 2)
    rank = ward.random.randrange(2)
    ranks.until_phase(f"rank-{rank}", "kv", "self-test", "ready", "serving")
    time.sleep(ward.random.uniform(0.0, 0.02))
    os.kill(ranks.processes[rank].pid, signal.SIGSTOP)
    at = f"rank {rank} in {phase(ranks.run_dir, f'rank-{rank}')}"
    return ranks.patient(at, subject=f"rank-{rank}")


def _stopped_serving(ward: Ward) -> Patient:
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE).ready()
    Load(ward, server)
    time.sleep(ward.random.uniform(0.3, 1.5))
    os.kill(server.pid("rank-0"), signal.SIGSTOP)
    return server.patient()


def _held_by_a_debugger(ward: Ward) -> Patient:
    """gdb at its prompt: attached, and nobody types."""
    if shutil.which("gdb") is None:
        raise Unavailable("gdb is not installed")
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE).ready()
    Load(ward, server)
    pid = server.pid("rank-0")
    ward.spawn(
        ["gdb", "-nx", "-iex", "set auto-solib-add off", "-p", str(pid)],
        {},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: _traced(pid), "gdb's stop")
    return server.patient()


def _traced(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "t"


def _changed_step(function: str) -> object:
    """A server whose engine makes a mistake at one of its steps, with requests that wait for it."""

    def start(ward: Ward) -> Patient:
        number = ward.random.randrange(60, 200)  # behind the steps that are measured at the start
        module = (
            "firstlight.engine.scheduler.scheduler"
            if function == "plan_nothing"
            else "firstlight.engine.core"
        )
        mistake = change("rank 0", module, function, number=number)
        server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, variables=mistake).ready()
        Load(ward, server)
        until_steps_end(server)
        return server.patient(f"at step {number}")

    return start


def _still_alone(phase: str, function: str, **section: object) -> Callable[[Ward], Patient]:
    """Rank 0 stands still in a phase that the other rank does not have, and has long passed."""

    def start(ward: Ward) -> Patient:
        mistake = change("rank 0", "firstlight.engine.worker.startup", "stand_still", where=function)
        ranks = Ranks(ward, ward.models / TINY, 2, variables=mistake, section=section)
        ranks.until_phase("rank-0", phase)
        return ranks.patient(f"rank 0 in {phase}")

    return start


def until_steps_end(server: Server) -> None:
    """Waits until requests are there and the step counter has not moved for half a second."""
    last, since_s = -1, time.monotonic()

    def stands() -> bool:
        nonlocal last, since_s
        boxes = [found for name in ("rank-0", "api") if (found := box(server.run_dir, name))]
        if boxes[0].step != last:
            last, since_s = boxes[0].step, time.monotonic()
        is_asked = any(found.running + found.waiting for found in boxes)
        return is_asked and time.monotonic() - since_s > 0.5

    until(stands, "the end of all steps", every_s=0.02)


def _main_waits(case: Case, *calls: str) -> bool:
    threads, process = case.of(Threads, "rank-0"), case.target.process("rank-0")
    if threads is None or process is None:
        return False
    return any(thread.tid == process.pid and thread.syscall in calls for thread in threads.threads)


def _holds_gil(case: Case) -> bool:
    stacks = case.of(PythonStacks, "rank-0")
    return stacks is not None and any(thread.owns_gil for thread in stacks.threads)


def _uses_a_core(case: Case) -> bool:
    pair = case.pair(ProcessState, "rank-0")
    return pair is not None and pair.second.value.cpu_s - pair.first.value.cpu_s > 0.1 * pair.seconds


KINDS = (
    Kind(
        name="stopped-before-weights",
        is_quick=True,
        what="a rank of two gets SIGSTOP during its imports",
        start=_stopped_early,
        causes=_STOPPED,
        conditions=_STUCK,
        subject="rank-1",
        holds=_is_stopped("rank-1"),
    ),
    Kind(
        name="stopped-after-weights",
        is_quick=True,
        what="a rank of two gets SIGSTOP after its weights are there, before it serves",
        start=_stopped_late,
        causes=_STOPPED,
        conditions=_STUCK,
    ),
    Kind(
        name="stopped-serving",
        what="the rank gets SIGSTOP while it answers requests",
        start=_stopped_serving,
        causes=_STOPPED,
        conditions=_STUCK,
        subject="rank-0",
        holds=_is_stopped("rank-0"),
    ),
    Kind(
        name="held-by-debugger",
        what="gdb is attached to the rank and holds it",
        start=_held_by_a_debugger,
        causes=_STOPPED,
        conditions=_STUCK,
        subject="rank-0",
        holds=_is_stopped("rank-0"),
    ),
    Kind(
        name="lock-order",
        is_quick=True,
        what="two threads of the rank take two locks in opposite orders",
        start=_changed_step("two_locks"),
        causes=frozenset({"lock-deadlock"}),
        conditions=_STUCK,
        subject="rank-0",
        holds=lambda case: _main_waits(case, "futex"),
    ),
    Kind(
        name="gil-held",
        what="the main thread waits in C code and keeps the interpreter's lock",
        start=_changed_step("wait_in_c"),
        causes=frozenset({"gil-held"}),
        conditions=_STUCK,
        subject="rank-0",
        holds=lambda case: _main_waits(case, "read"),
    ),
    Kind(
        name="gil-busy",
        what="a pattern match with an exponential search in C code",
        start=_changed_step("long_match"),
        causes=frozenset({"gil-held", "spinning"}),
        why="the lock is held by C code, and that code spins: both are true and lead to the same frame",
        conditions=_STUCK,
        subject="rank-0",
        settle_s=5.0,
        holds=_uses_a_core,
    ),
    *(
        Kind(
            name=f"alone-in-{phase}",
            is_quick=phase == DRAFTER,
            what=f"rank 0 waits for ever in {phase}, a phase that only it has",
            start=_still_alone(phase, function, **section),
            causes=frozenset({"rank-behind", "collective-desync"}),
            why="where the other rank waits for it in a collective, both are true and name the same rank",
            conditions=_STUCK,
            subject="rank-0",
            settle_s=5.0,
            holds=lambda case: _main_waits(case, "recvfrom"),
        )
        for phase, function, section in (
            (DRAFTER, "read_drafting", {"drafter": "ngram"}),
            (SELF_TEST, "self_test", {}),
        )
    ),
    Kind(
        name="scheduler-spins",
        what="the scheduler has work and plans nothing, in a loop without a step",
        start=_changed_step("plan_nothing"),
        causes=frozenset({"spinning"}),
        conditions=_STUCK,
        subject="rank-0",
        settle_s=5.0,
        holds=_uses_a_core,
    ),
)
