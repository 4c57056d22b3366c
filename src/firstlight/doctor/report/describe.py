"""Names, places and states of processes as words in a sentence.

Pure. Invariant: what is not known is not said.
"""

from __future__ import annotations

from firstlight.doctor.case.values_process import PythonStacks
from firstlight.doctor.case.view import View
from firstlight.doctor.motion.motion import ProcessMotion, State

_SHOWN_FRAMES = 3
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def title(key: str) -> str:
    """A process in a sentence: "rank 0", "the api process", "helper 4711"."""
    if key in ("api", "engine", "detokenizer", "launcher", "supervisor"):
        return f"the {key} process" if key != "supervisor" else "the supervisor"
    return key.replace("-", " ")


def named(view: View, key: str) -> str:
    """With its number: "rank 0 (pid 4711)"."""
    pid = view.pid(key)
    return f"{title(key)} (pid {pid})" if pid and str(pid) not in key else title(key)


def state(motion: ProcessMotion) -> str:
    """What the motion of a process says, as the end of a sentence."""
    quiet = f"{motion.quiet_s:.0f} s"
    return {
        State.STOPPED: "is stopped",
        State.ZOMBIE: "is dead, and nobody took note of it",
        State.DEAD: "is dead",
        State.BLOCKED: f"is blocked: no thread has used the processor for {quiet}",
        State.SPINNING: f"is spinning: {motion.cores or 0:.1f} cores, and no progress for {quiet}",
        State.SLOW: f"is slow: {', '.join(motion.reasons)}",
        State.MOVING: f"is moving: {', '.join(motion.reasons)}",
        State.IDLE: "is idle",
    }.get(motion.state, "may be stuck")


def where(view: View, key: str) -> str:
    """Phase, amount, collective and operator of a process with a black box; starts with a comma."""
    seen = view.box(key)
    phase = seen.value.box.phase if seen else None
    if seen is None or phase is None:
        return ""
    text = f", in phase {phase.name}"
    if phase.odometer.total:
        unit = phase.odometer.unit
        done = _amount(phase.odometer.done, unit if unit == "bytes" else "")
        text += f" at {done} of {_amount(phase.odometer.total, phase.odometer.unit)}"
    entered, left = seen.value.box.entered, seen.value.box.left
    if entered.number > left.number:
        text += f", inside the collective {entered.name!r} number {entered.number}"
    operator = seen.value.box.operator
    if operator.name:
        text += f", at the operator {operator.name!r}"
        text += f" of layer {operator.layer}" if operator.layer else ""
    return text


def stack(view: View, key: str) -> str:
    """The innermost frames of its main thread; empty when they could not be seen."""
    seen = view.case.seen(PythonStacks, key)
    if seen is None or not seen.value.threads or not seen.value.threads[0].frames:
        return ""
    frames = seen.value.threads[0].frames[:_SHOWN_FRAMES]
    return " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in frames)


def _amount(value: int, unit: str) -> str:
    if unit != "bytes":
        return f"{value} {unit}".strip()
    for size, name in _BYTES:
        if value >= size:
            return f"{value / size:.2f} {name}"
    return f"{value} bytes"
