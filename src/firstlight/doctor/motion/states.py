"""The states that processes and servers are found in, and the bounds between them.

Invariant: a state carries the evidence it was judged from.
"""

from __future__ import annotations

import enum

import msgspec

from firstlight.doctor.case.target import Role
from firstlight.doctor.motion.progress import Progress
from firstlight.doctor.motion.serving import Serving


class State(enum.Enum):
    """What a process, or the server, is doing."""

    MOVING = "moving"
    SLOW = "slow"  # useful progress, but less than expected
    BLOCKED = "blocked"  # none, and every thread sleeps
    SPINNING = "spinning"  # none, though a core is busy, and for too long
    STOPPED = "stopped"  # SIGSTOP, or held by a debugger
    ZOMBIE = "zombie"
    DEAD = "dead"
    IDLE = "idle"  # serving, and nothing to do: healthy
    UNCLEAR = "unclear"


GONE = (State.DEAD, State.ZOMBIE)
FATAL = (*GONE, State.STOPPED)  # one look is enough: none of them comes back by itself


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds between the states."""

    blocked_cores: float = 0.01  # of the busiest thread
    spinning_cores: float = 0.5
    spin_after_s: float = 60.0  # of a start-up phase of which nothing tells how long a piece of it takes
    spin_factor: float = 3.0  # times what the next piece should take, where that is known
    spin_least_s: float = 10.0
    spin_most_s: float = 600.0
    spin_serving_after_s: float = 5.0
    slow_bytes_per_s: float = 20e6  # of weights, from any disk worth the name
    slow_share: float = 0.25  # of the phase's own average rate
    polling_cores: float = 0.1  # a loop that looks for something every few milliseconds
    disk_wait_s: float = 30.0  # the longest a disk or a network file system may take for one read


class ProcessMotion(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `quiet_s`: for how long nothing is known to have moved, if nothing moved."""

    key: str
    role: Role | None
    rank: int | None
    state: State
    reasons: tuple[str, ...]
    evidence: tuple[str, ...]
    progress: tuple[Progress, ...] = ()
    cores: float | None = None
    quiet_s: float = 0.0


class ServerMotion(msgspec.Struct, frozen=True, kw_only=True):
    """The server. `living_ranks` counts ranks that are neither dead nor zombies."""

    state: State
    reasons: tuple[str, ...]
    processes: tuple[ProcessMotion, ...]
    serving: Serving
    living_ranks: int
    expected_ranks: int | None
    evidence: tuple[str, ...] = ()

    def of(self, key: str) -> ProcessMotion | None:
        """The motion of one process."""
        return next((motion for motion in self.processes if motion.key == key), None)

    def with_state(self, *states: State) -> tuple[ProcessMotion, ...]:
        """The processes in one of these states."""
        return tuple(motion for motion in self.processes if motion.state in states)
