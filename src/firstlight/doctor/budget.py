"""How long the next piece of a phase may take, from what its process has done so far.

Called by `motion`. Pure. Facts, not wishes: the pieces of this phase over the time in which they came, else
the time that all the weights took to read. Time in which nothing came does not count, so that a slow disk
lengthens the budget and a stuck process does not.
"""

from __future__ import annotations

from firstlight.base.blackbox.reader import Box
from firstlight.doctor.evidence import Case
from firstlight.doctor.values_process import BlackBoxSeen

_CHUNK_BYTES = 64 << 20  # bytes come in pieces of about this size
_WEIGHTS = "weights"


def piece_of(case: Case, key: str, quiet_s: float) -> float | None:
    """`expected_piece_s` of a process at the latest look; None: it has no box."""
    seen = case.seen(BlackBoxSeen, key)
    if seen is None:
        return None
    box = seen.value.box
    return expected_piece_s(box, box.made_monotonic_s + seen.time_s - box.made_wall_s, quiet_s)


def longest_step_s(case: Case, key: str) -> float:
    """Of the engine's steps that its box remembers; 0 without any. A long prompt's take many seconds."""
    seen = case.seen(BlackBoxSeen, key)
    events = seen.value.box.events if seen else ()
    return max((event.values[3] / 1e6 for event in events if event.name == "step"), default=0.0)


def expected_piece_s(box: Box, now_s: float, quiet_s: float) -> float | None:
    """Seconds that one more unit (of bytes: one read) should take. `now_s` on the box's monotonic clock.

    None: nothing tells.
    """
    phase = box.phase
    if phase is None:
        return None
    odometer, moving_s = phase.odometer, now_s - quiet_s - phase.start_s
    if odometer.done > 0 and moving_s > 0:
        pieces = odometer.done / _CHUNK_BYTES if odometer.unit == "bytes" else odometer.done
        return moving_s / max(pieces, 1e-9)
    ends = [*(later.start_s for later in box.phases[1:]), now_s]
    read = [end - one.start_s for one, end in zip(box.phases, ends, strict=True) if one.name == _WEIGHTS]
    return max(read, default=None)
