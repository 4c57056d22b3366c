"""The supervisor's verdict on an engine that stands still, in one message and one remedy. Pure.

Called by `watch` with what the doctor saw. Invariant: the message names a process, where it is and what was
seen of it; what is not known is not said.
"""

from __future__ import annotations

from firstlight.base.errors import EngineError
from firstlight.base.failure import Failure
from firstlight.doctor.evidence import Case
from firstlight.doctor.motion import ProcessMotion, ServerMotion, State
from firstlight.doctor.values_process import BlackBoxSeen, PythonStacks
from firstlight.doctor.waits import WaitGraph
from firstlight.launch.amounts import amount
from firstlight.launch.commands import title
from firstlight.launch.control import Stalled

_STUCK = (State.STOPPED, State.ZOMBIE, State.DEAD, State.BLOCKED, State.SPINNING)
_PROVEN = (State.STOPPED, State.ZOMBIE, State.DEAD)
_SHOWN_FRAMES = 3


def stalled(case: Case, motion: ServerMotion, graph: WaitGraph) -> Stalled | None:
    """The verdict, or None when the doctor does not call it stuck."""
    if motion.state not in _STUCK:
        return None
    suspect = _suspect(motion, graph)
    if suspect is None:
        return None
    process = case.target.process(suspect.key)
    pid = process.pid if process is not None else None
    parts = [
        f"{title(suspect.key)}{f' (pid {pid})' if pid else ''} {_what(suspect)}{_where(case, suspect.key)}",
        *_stack(case, suspect.key),
        *_waiters(graph, suspect.key),
    ]
    return Stalled(
        Failure(f"{'; '.join(parts)}.", _hint(suspect, pid, case.target.run_dir), EngineError.exit_code),
        suspect.key,
    )


def is_proven(motion: ServerMotion) -> bool:
    """Whether one look is enough: who is stopped or dead does not come back by itself."""
    return motion.state in _PROVEN


def _suspect(motion: ServerMotion, graph: WaitGraph) -> ProcessMotion | None:
    """Who is dead or stopped; else whom the others wait for and who waits for nobody; else who is stuck."""
    fatal = motion.with_state(*_PROVEN)
    if fatal:
        return fatal[0]
    stuck = motion.with_state(State.SPINNING, State.BLOCKED)
    for key in graph.sinks:
        found = next((one for one in stuck if one.key == key), None)
        if found is not None and graph.waiters_of(key):
            return found
    return stuck[0] if stuck else None


def _what(suspect: ProcessMotion) -> str:
    return {
        State.STOPPED: "is stopped",
        State.ZOMBIE: "is dead, and nobody took note of it",
        State.DEAD: "is dead",
        State.BLOCKED: f"is blocked: no thread has used the processor for {suspect.quiet_s:.0f} s",
        State.SPINNING: f"is spinning: {suspect.cores or 0:.1f} cores, and no progress for "
        f"{suspect.quiet_s:.0f} s",
    }[suspect.state]


def _where(case: Case, key: str) -> str:
    seen = case.of(BlackBoxSeen, key)
    phase = seen.box.phase if seen is not None else None
    if seen is None or phase is None:
        return ""
    text = f", in phase {phase.name}"
    odometer = phase.odometer
    if odometer.total:
        done = amount(odometer.done, odometer.unit, short=True)
        text += f" at {done} of {amount(odometer.total, odometer.unit)}"
    entered, left = seen.box.entered, seen.box.left
    if entered.number > left.number:
        text += f", inside the collective {entered.name!r} number {entered.number}"
    return text


def _stack(case: Case, key: str) -> list[str]:
    """Where its main thread is in its Python code, if that could be seen."""
    stacks = case.of(PythonStacks, key)
    if stacks is None or not stacks.threads or not stacks.threads[0].frames:
        return []
    frames = stacks.threads[0].frames[:_SHOWN_FRAMES]
    return [f"its main thread is in {' < '.join(frame.function for frame in frames)}"]


def _waiters(graph: WaitGraph, key: str) -> list[str]:
    edges = [edge for edge in graph.edges if edge.holder == key]
    return [f"{title(edge.waiter)} waits for it: {edge.why}" for edge in edges[:3]]


def _hint(suspect: ProcessMotion, pid: int | None, run_dir: str | None) -> str:
    if suspect.state is State.STOPPED and pid:
        return f"`kill -CONT {pid}` lets it go on; a debugger that holds it must detach."
    look = f"`firstlight blackbox {run_dir}` shows what every process did last"
    if suspect.state in (State.ZOMBIE, State.DEAD):
        return f"{look}; its log is beside it."
    return f"`py-spy dump --pid {pid}` shows where it is; {look}."
