"""Does it move? The judgement of two looks, of each process and of the server as a whole.

Pure. Blocked, spinning and slow are told apart as the phases of a healthy start demand: a slow disk and a
long compile are not stuck, and a server that nobody asks anything is flat and healthy. Invariant: a state
cites the evidence it was judged from; what two looks cannot decide is `UNCLEAR`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from firstlight.base.blackbox.reader import Box
from firstlight.base.phases import WEIGHTS
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import Role
from firstlight.doctor.case.values_process import BlackBoxSeen, LogTail, ProcessState
from firstlight.doctor.motion.progress import ProcessorUse, Progress, heart_beats, processor_use, progress_of
from firstlight.doctor.motion.serving import Serving, serving_of
from firstlight.doctor.motion.states import FATAL, ProcessMotion, ServerMotion, State, Thresholds
from firstlight.doctor.motion.wait_signatures import build_wait, disk_wait, full_pipe_writers, polls

__all__ = ["ProcessMotion", "ServerMotion", "State", "Thresholds", "judge_motion"]
_MOST_CROWDED_SPIN_S = 7.5  # a verdict on a loop is due within ten seconds
_WATCHERS = (Role.SUPERVISOR, Role.JANITOR)
_CHUNK_BYTES = 64 << 20  # bytes come in pieces of about this size


def judge_motion(
    case: Case, thresholds: Thresholds | None = None, quiet_s: Mapping[str, float] | None = None
) -> ServerMotion:
    """Judge every process of a case and the server.

    `quiet_s`: for how long each process has not moved, from somebody who watched it all the time.
    """
    judge = _Judge(case, thresholds or Thresholds(), quiet_s or {}, serving_of(case))
    motions = tuple(judge.process(key) for key in case.subjects if judge.is_process(key))
    return _server(case, motions, judge.serving)


class _Judge:
    """One case with its thresholds."""

    def __init__(
        self, case: Case, thresholds: Thresholds, quiet_s: Mapping[str, float], serving: Serving
    ) -> None:
        self.case = case
        self.thresholds = thresholds
        self.watched_s = quiet_s
        self.serving = serving

    def is_process(self, key: str) -> bool:
        """Subjects that only left a log or last words are no processes that could move."""
        is_known = self.case.target.process(key) is not None
        return is_known or self.case.of(BlackBoxSeen, key) is not None

    def process(self, key: str) -> ProcessMotion:
        """The state of one process."""
        state, reasons, evidence = self._fate(key) or (None, (), ())
        process = self.case.target.process(key)
        box = self.case.of(BlackBoxSeen, key)
        rank = process.rank if process else box.box.rank if box else None
        role = process.role if process else Role.RANK if rank is not None else None
        use, progress = processor_use(self.case, key), progress_of(self.case, key)
        quiet_s = 0.0 if progress else self._quiet_s(key)
        progress = progress or self._awaited(key, quiet_s)
        if state is None:
            state, reasons = self._living(key, use, progress, quiet_s)
            evidence = (*(use.evidence if use else ()), *(i for p in progress for i in p.evidence))
            if state is State.IDLE:
                evidence = (*evidence, *self.serving.evidence)
        return ProcessMotion(
            key=key,
            role=role,
            rank=rank,
            state=state,
            reasons=reasons,
            evidence=tuple(dict.fromkeys(evidence)),
            progress=progress,
            cores=use.cores if use else None,
            quiet_s=quiet_s,
        )

    def _fate(self, key: str) -> tuple[State, tuple[str, ...], tuple[str, ...]] | None:
        """Dead, zombie or stopped, by the latest look."""
        seen = self.case.seen(ProcessState, key)
        if seen is None:
            box = self.case.seen(BlackBoxSeen, key)
            if box is None or box.value.is_alive:
                return None
            pid = box.value.box.pid
            reason = f"the writer of its black box (pid {pid}) has ended" if pid else "it was never started"
            return State.DEAD, (reason,), (box.id,)
        value = seen.value
        if value.is_gone:
            return State.DEAD, ("it has ended",), (seen.id,)
        if value.is_zombie and value.num_threads <= 1:
            reason = f"it has ended and its parent (pid {value.parent}) has not taken note"
            return State.ZOMBIE, (reason,), (seen.id,)
        if value.is_stopped:
            by = f"by the tracer with pid {value.tracer_pid}" if value.tracer_pid else "by a signal"
            return State.STOPPED, (f"it was stopped {by}",), (seen.id,)
        return None

    def _awaited(self, key: str, quiet_s: float) -> tuple[Progress, ...]:
        """What a process without progress of its own has asked for, and may still get."""
        found = build_wait(self.case, key), disk_wait(self.case, key)
        limits_s = math.inf, self.thresholds.disk_wait_s
        return tuple(p for p, limit_s in zip(found, limits_s, strict=True) if p and quiet_s < limit_s)

    def _living(
        self, key: str, use: ProcessorUse | None, progress: tuple[Progress, ...], quiet_s: float
    ) -> tuple[State, tuple[str, ...]]:
        if progress:
            state = State.SLOW if all(self._is_slow(key, item) for item in progress) else State.MOVING
            return state, tuple(item.detail for item in progress)
        if use is None:
            return State.UNCLEAR, ("there were not two looks at its processor time",)
        process = self.case.target.process(key)
        if process is not None and process.role in _WATCHERS and use.cores < self.thresholds.spinning_cores:
            if any(full_pipe_writers(self.case, key)):
                return State.BLOCKED, ("it is inside a write to a pipe that nobody reads",)
            return State.IDLE, ("it only watches the others",)
        beats = heart_beats(self.case, key)
        if beats is False:
            return State.BLOCKED, (f"its event loop did not turn ({use.cores:.2f} cores)",)
        if beats and use.cores < self.thresholds.spinning_cores:
            return State.IDLE, ("its event loop turns, and waits for the others",)
        return self._flat(key, use, quiet_s)

    def _flat(self, key: str, use: ProcessorUse, quiet_s: float) -> tuple[State, tuple[str, ...]]:
        """Nothing useful moved: what its use of the processor makes of that."""
        if use.busiest >= self.thresholds.blocked_cores and use.wanted >= self.thresholds.spinning_cores:
            return self._busy(key, use, quiet_s)
        if self.serving.is_idle:
            return State.IDLE, (f"the server is up and nothing is asked of it ({use.cores:.2f} cores)",)
        if use.busiest < self.thresholds.blocked_cores:
            return State.BLOCKED, (f"no thread used the processor, and nothing moved for {quiet_s:.0f} s",)
        reason = polls(self.case, key) if use.busiest < self.thresholds.polling_cores else ""
        if reason:
            return State.BLOCKED, (reason,)
        return State.UNCLEAR, (f"nothing useful moved, and it used {use.cores:.2f} cores",)

    def _busy(self, key: str, use: ProcessorUse, quiet_s: float) -> tuple[State, tuple[str, ...]]:
        if self.serving.is_up and not self.serving.num_requests and self.serving.is_generating is not False:
            # Without a request that waits in every look, a busy process may well have answered some.
            return State.MOVING, (f"it uses {use.cores:.2f} cores, and no request is known to wait",)
        longest_s = longest_step_s(self.case, key)
        base_s = self.thresholds.spin_serving_after_s
        crowded_s = min(base_s * use.crowding, _MOST_CROWDED_SPIN_S)
        limit_s = max(base_s, crowded_s, self.thresholds.spin_factor * longest_s)
        if not self.serving.is_up:
            limit_s = self._spin_limit_s(key, quiet_s)
        text = f"it uses {use.cores:.2f} cores, and nothing useful has moved for {quiet_s:.0f} s"
        if quiet_s >= limit_s:
            return State.SPINNING, (text,)
        return State.MOVING, (f"{text}, which is too short to call it spinning (limit {limit_s:.0f} s)",)

    def _spin_limit_s(self, key: str, quiet_s: float) -> float:
        """For how long a start-up phase may be busy without a piece done."""
        bounds, expected_s = self.thresholds, piece_of(self.case, key, quiet_s)
        if expected_s is None:
            return bounds.spin_after_s
        return min(bounds.spin_most_s, max(bounds.spin_least_s, bounds.spin_factor * expected_s))

    def _is_slow(self, key: str, item: Progress) -> bool:
        """Pages through a mapping and compilers are slow by nature; bytes and units by their rate."""
        if item.what in ("major faults", "compilers", "disk wait"):
            return True
        if item.what == "bytes read":
            return item.per_s < self.thresholds.slow_bytes_per_s
        pair = self.case.pair(BlackBoxSeen, key)
        phase = pair.first.value.box.phase if pair else None
        if item.what != "odometer" or pair is None or phase is None:
            return False
        if phase.odometer.unit == "bytes" and item.per_s < self.thresholds.slow_bytes_per_s:
            return True
        seconds = pair.first.time_s - pair.first.value.box.wall_s(phase.start_s)
        average = phase.odometer.done / seconds if seconds > pair.seconds else 0.0
        return item.per_s < average * self.thresholds.slow_share

    def _quiet_s(self, key: str) -> float:
        """For how long nothing has moved, by whoever knows best."""
        if key in self.watched_s:
            return self.watched_s[key]
        pair = self.case.pair(ProcessState, key)
        between_s = pair.seconds if pair else 0.0
        box = self.case.of(BlackBoxSeen, key)
        if box is not None and box.age_s is not None:
            return max(between_s, box.age_s)
        logs = self.case.all(LogTail, subject=key) or self.case.all(LogTail, subject="run")
        ages_s = [log.time_s - log.value.modified_wall_s for log in logs]
        return max(between_s, min(ages_s, default=0.0))


_VITAL = (Role.SUPERVISOR, Role.LAUNCHER, Role.API, Role.ENGINE, Role.RANK, Role.DETOKENIZER)
_WORKING = (Role.ENGINE, Role.RANK)


def _server(case: Case, motions: tuple[ProcessMotion, ...], serving: Serving) -> ServerMotion:
    vital = [motion for motion in motions if motion.role in _VITAL] or list(motions)
    core = [motion for motion in vital if motion.role in _WORKING] or vital
    if not serving.is_up and all(motion.role in _WATCHERS for motion in core):
        core = []  # nobody is there yet who could serve: that they only watch says nothing
    living = sum(m.role is Role.RANK and m.state not in (State.DEAD, State.ZOMBIE) for m in motions)
    # While it starts, anybody may be what the others wait for; later, requests keep the api process moving.
    movers = vital if not serving.is_up and any(motion.progress for motion in vital) else core
    state, deciding = _overall(vital, core, movers)
    reasons = [f"{motion.key}: {reason}" for motion in deciding for reason in motion.reasons]
    if not motions:
        reasons.append("no process of the server was found")
    expected = case.target.expected_ranks
    if expected is not None and living < expected and case.target.is_complete:
        reasons.append(f"{living} of {expected} ranks are alive ({case.target.expected_from})")
    return ServerMotion(
        state=state,
        reasons=tuple(reasons),
        processes=motions,
        serving=serving,
        living_ranks=living,
        expected_ranks=expected,
        evidence=tuple(dict.fromkeys(i for motion in deciding for i in motion.evidence)),
    )


def _overall(
    vital: list[ProcessMotion], core: list[ProcessMotion], movers: list[ProcessMotion]
) -> tuple[State, list[ProcessMotion]]:
    """The server's state, and the processes that decide it. `movers`: whose progress counts."""
    if not vital:
        return State.DEAD, []
    for state in FATAL:
        if found := [motion for motion in vital if motion.state is state]:
            return state, found
    for state in (State.MOVING, State.SLOW, State.SPINNING):
        if found := [motion for motion in movers if motion.state is state]:
            return state, found
    states = {motion.state for motion in core}
    if core and states <= {State.IDLE}:
        stuck = [motion for motion in vital if motion.state is State.BLOCKED]
        return (State.BLOCKED, stuck) if stuck else (State.IDLE, core)
    if State.BLOCKED in states and State.UNCLEAR not in states:
        return State.BLOCKED, [motion for motion in core if motion.state is State.BLOCKED]
    return State.UNCLEAR, core or vital


# How long the next piece of a phase may take, from what its process has done so far. Facts, not wishes: the
# pieces of this phase over the time in which they came, else the time that all the weights took to read.
# Time in which nothing came does not count, so that a slow disk lengthens the budget and a stuck process
# does not.


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
    read = [end - one.start_s for one, end in zip(box.phases, ends, strict=True) if one.name == WEIGHTS]
    return max(read, default=None)
