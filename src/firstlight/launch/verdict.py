"""Why a run ended: one message, one remedy, one exit code, from the deaths of the children. Pure.

Invariant: the first cause wins over its consequences: an error that a user can cause, then a death by signal,
then a crash, then the complaint of a rank that lost another.
"""

from __future__ import annotations

import signal

import msgspec

from firstlight.base.errors import EngineError
from firstlight.base.failure import Failure
from firstlight.launch.control import LaunchState
from firstlight.launch.events import FAILURE_CODES, Death, Stalled
from firstlight.launch.processes.commands import title

_INTERRUPTED = 130
_LESS_MEMORY = (
    "lower --memory-fraction, --kv-memory, --max-model-len, --max-num-seqs or --max-batched-tokens, leave "
    "the drafter out (--drafter none), or give it more memory."
)
_KILLED = {
    True: f"The kernel ended it for want of memory: {_LESS_MEMORY}",
    False: "Somebody killed it, but not the kernel for want of memory: find out who did, and start again.",
    None: f"Somebody killed it; if it was the kernel for want of memory (see `dmesg`), {_LESS_MEMORY}",
}
_NATIVE_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


class Verdict(msgspec.Struct, frozen=True):
    """The end of a run, or why it does not go on. `failure` None: it was asked to end, and did.

    `death` or `stall` is the one that explains it.
    """

    exit_code: int
    failure: Failure | None = None
    death: Death | None = None
    stall: Stalled | None = None

    @property
    def subject(self) -> str:
        """The process to blame; empty if that is not known."""
        by = self.death or self.stall
        return by.name if by is not None else ""


def verdict(state: LaunchState) -> Verdict:
    """What the supervisor says and returns at the end of a run, and to clients as soon as it is lost."""
    death = min(state.deaths, key=_place, default=None)
    if state.stall is not None and (death is None or death.told):
        return Verdict(state.stall.failure.exit_code, state.stall.failure, stall=state.stall)
    if death is None and state.asked:  # nobody died of it: what was killed waits in the kernel
        return Verdict(_INTERRUPTED)
    assert death is not None, "there is no verdict on a run that goes on"
    if state.asked and death.told:
        return Verdict(_INTERRUPTED if state.was_killed else 0)
    failure = death.failure or _guess(death)
    if state.stall is not None:
        message = f"{failure.message} Before that nothing moved: {state.stall.failure.message}"
        failure = msgspec.structs.replace(failure, message=message)
    return Verdict(failure.exit_code, failure, death)


def _place(death: Death) -> tuple[int, float]:
    """Where a death stands in the order of likely causes; the smallest is the cause."""
    if death.failure is not None and death.failure.exit_code not in FAILURE_CODES:
        return 0, death.time_s
    if death.told:
        return 4, death.time_s
    if death.failure is not None:
        return 3, death.time_s
    return (1 if death.cause.signal is not None else 2), death.time_s


def _guess(death: Death) -> Failure:
    """What can be said of a child that left no last words."""
    last = next((line for line in reversed(death.last_lines) if line.strip()), "")
    message = f"{title(death.name)} {death.cause.describe()}" + (f": {last.strip()}" if last else ".")
    return Failure(message, _hint(death), EngineError.exit_code)


def _hint(death: Death) -> str:
    if death.cause.signal == signal.SIGKILL:
        return _KILLED[death.is_oom]
    if death.cause.signal in _NATIVE_FAULTS:
        return "Native code crashed; run again with --debug and report what it prints."
    return "Run again with --debug to see all that it printed."
