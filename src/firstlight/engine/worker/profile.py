"""A profile of decode steps: every rank records the same turns, rank 0 brings them together.

A turn is a step with all that a rank does from the end of the one before. Turns alternate in blocks between
clock on and off, which tells what recording costs. Invariants: a profile ends after so many turns or when it
is told to, and no token depends on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch

from firstlight.engine.messages import Profile, StartProfile, StepGroup, StopProfile, ToEngine
from firstlight.engine.scheduler.plan import Recording, StepPlan
from firstlight.ops.collectives import Group
from firstlight.ops.step_clock import WORDS, Kind

BLOCK_TURNS = 4  # with the clock on, then as many with the clock off
MOST_TURNS = 16_384  # of one profile, prompts' steps among them
LEAST_COMPARED = 8  # steps on each side, for a statement on the overhead
_COLUMNS = len(Kind) + 1  # of a turn: nanoseconds of each kind, and of all of it


class TurnTimes:
    """One rank's recorded turns."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rows = array("d")
        self.num = 0

    @staticmethod
    def is_recorded(turn: int) -> bool:
        """Whether the clock is on in this turn."""
        return turn // BLOCK_TURNS % 2 == 0

    def begin(self) -> None:
        """The first turn begins now."""
        self._rows, self.num = array("d"), 0
        self._group.clock.turn(on=True)

    def end_turn(self) -> None:
        """A step is over, and so is all that follows from it."""
        self.num += 1
        kinds_ns, all_ns = self._group.clock.turn(on=self.is_recorded(self.num))
        self._rows.extend((*kinds_ns, all_ns))

    def hand_in(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Ends the recording; seconds [turns, ranks, kinds + 1] of all ranks, which call it together."""
        group = self._group
        group.clock.turn(on=False)
        own = np.array(self._rows).reshape(-1, _COLUMNS) / 1e9
        self._rows = array("d")
        rows = torch.from_numpy(own).float().to(group.device)
        whole = group.gather_columns("profile", rows, [_COLUMNS] * group.size) if len(own) else rows
        return whole.cpu().double().numpy().reshape(-1, group.size, _COLUMNS)


def obey(order: Recording, turns: TurnTimes) -> bool:
    """What a rank other than 0 does with an order; whether it records from now on."""
    if order.is_on:
        turns.begin()
    else:
        turns.hand_in()
    return order.is_on


@dataclass(frozen=True)
class _Turn:
    """What rank 0 knows of a turn."""

    num_sequences: int
    num_rows: int
    context_tokens: float
    is_decode: bool  # and there was no pause before it
    idle_s: float


class Profiler:
    """Rank 0's side. `tell` sends an order to the other ranks."""

    def __init__(self, group: Group, tell: Callable[[Recording], None]) -> None:
        self._group, self._tell = group, tell
        self._times = TurnTimes(group)
        self._turns: list[_Turn] = []
        self._wanted = 0
        self._num_recorded = 0
        self._plan: StepPlan | None = None
        self._has_paused = False
        self._began_s = self._idle_s = 0.0  # idle: since the last turn
        self.is_active = False

    def handle(self, message: ToEngine) -> Profile | None:
        """Takes an order; a profile, where it ends one."""
        if isinstance(message, StartProfile):
            if self.is_active:
                self._finish()
            self._begin(message.num_steps)
        elif isinstance(message, StopProfile) and self.is_active:
            return self._finish()
        return None

    def receive(self, receive: Callable[[bool], list[ToEngine]], wait: bool) -> list[ToEngine]:
        """Calls `receive(wait)`; a pause is no part of a step."""
        if not (wait and self.is_active):
            return receive(wait)
        started_s = monotonic()
        messages = self._group.clock.run(Kind.WAITING, receive, wait)
        self._idle_s += monotonic() - started_s
        self._has_paused = True
        return messages

    def saw(self, plan: StepPlan) -> None:
        """This plan runs now."""
        self._plan = plan

    def end_turn(self) -> Profile | None:
        """What a step gave is sent; a profile, if this turn was its last."""
        plan = self._plan
        if not self.is_active or plan is None:
            return None
        num = len(plan.slots)
        is_decode = len(plan.samples) == plan.num_tokens and not self._has_paused
        self._num_recorded += is_decode and self._times.is_recorded(self._times.num)
        self._turns.append(_Turn(num, plan.num_tokens, sum(plan.starts) / num, is_decode, self._idle_s))
        self._times.end_turn()
        self._plan, self._has_paused, self._idle_s = None, False, 0.0
        is_last = self._num_recorded >= self._wanted or self._times.num >= MOST_TURNS
        return self._finish() if is_last else None

    def _begin(self, num_steps: int) -> None:
        self._wanted, self._num_recorded, self._turns = num_steps, 0, []
        self._plan, self._has_paused = None, True  # ranks do not begin at the same moment
        self._began_s, self._idle_s = monotonic(), 0.0
        self.is_active = True
        self._tell(Recording(is_on=True))
        self._times.begin()

    def _finish(self) -> Profile:
        self.is_active = False
        window_s = monotonic() - self._began_s
        self._tell(Recording(is_on=False))
        return summary(self._turns, self._times.hand_in(), window_s, self._idle_s)


def summary(turns: list[_Turn], seconds_TRK: np.ndarray[Any, Any], window_s: float, idle_s: float) -> Profile:
    """The profile of turns with their times [turns, ranks, kinds + 1]. `idle_s`: since the last of them."""
    idle_before_s = sum(turn.idle_s for turn in turns)
    is_decode = np.array([turn.is_decode for turn in turns], dtype=bool)
    is_on = np.array([TurnTimes.is_recorded(number) for number in range(len(turns))], dtype=bool)
    sizes = np.array([(turn.num_sequences, turn.num_rows) for turn in turns]).reshape(-1, 2)
    counted = is_decode & is_on
    groups = []
    for size in np.unique(sizes[counted], axis=0):
        chosen = np.flatnonzero(counted & (sizes == size).all(1))
        groups.append(_group(size.tolist(), [turns[t].context_tokens for t in chosen], seconds_TRK[chosen]))
    of_rank_0 = seconds_TRK[:, 0, -1]
    return Profile(
        num_ranks=seconds_TRK.shape[1],
        num_steps=int(counted.sum()),
        num_plain_steps=int((is_decode & ~is_on).sum()),
        num_other_steps=int((~is_decode).sum()),
        window_s=window_s,
        other_s=float(of_rank_0[~is_decode].sum()) - idle_before_s,
        idle_s=idle_before_s + idle_s,
        overhead=_overhead(of_rank_0, sizes, is_decode, is_on),
        groups=groups,
    )


def _group(size: list[int], contexts: list[float], seconds_TRK: np.ndarray[Any, Any]) -> StepGroup:
    sums_RK = seconds_TRK.sum(0)
    return StepGroup(
        num_sequences=size[0],
        num_rows=size[1],
        num_steps=len(contexts),
        context_tokens=sum(contexts) / len(contexts),
        wall_s=sums_RK[:, -1].tolist(),
        kinds_s=[{words: float(row[kind]) for kind, words in WORDS.items()} for row in sums_RK],
    )


def _overhead(
    wall_T: np.ndarray[Any, Any],
    sizes_T2: np.ndarray[Any, Any],
    is_decode: np.ndarray[Any, Any],
    is_on: np.ndarray[Any, Any],
) -> float | None:
    """Of steps of the size that there are most of."""
    if not is_decode.any():
        return None
    found, counts = np.unique(sizes_T2[is_decode], axis=0, return_counts=True)
    alike = is_decode & (sizes_T2 == found[counts.argmax()]).all(1)
    on, off = wall_T[alike & is_on], wall_T[alike & ~is_on]
    if min(len(on), len(off)) < LEAST_COMPARED:
        return None
    return float(np.median(on) / np.median(off) - 1.0)
