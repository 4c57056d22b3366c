"""How many drafts a step carries: as many as pay, by what steps take and by what was accepted lately.

Asked by `Speculation` before every step. Invariant: without drafts that pay it answers 0, but for a look now
and then at whether they would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

# Acceptance of the first draft, and of each later one after the one before it, until more is known.
FIRST_GUESS = 0.6
_PRIOR_WEIGHT = 2.0
_KEPT = 1.0 - 1.0 / 48.0  # of a count, at each verification: the last few dozen matter
_LEAST_COVERAGE = 0.02  # a drafter that knew nothing for long may know something now
_NEW_TIME = 0.1  # weight of a new step in the running mean of all
_NEW_OWN = 0.02  # and in that of its size
_LONGEST_OUTLIER = 3.0  # a step of that many times the mean counts as no more
# A gain of less is not worth the risk that the estimate is wrong.
LEAST_GAIN = 1.02
LEAST_MORE = 1.005  # for each draft more
# While no drafts are made: steps between two looks, at least, and what the past may weigh against a look.
STEPS_BETWEEN_LOOKS = 64
LOOK_TOKENS = 2
LOOK_SHARE = 0.01  # of the time, at most
_PAST_WEIGHT = 4.0


class StepTimes:
    """Seconds of a step of m rows: those of the start, corrected by the steps that come.

    A machine that is slower or quicker than at the start is so for every size, so most of a correction goes
    to all: sizes that do not come stay comparable with those that do.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._curve_s = dict(measured)
        self._rows = sorted(self._curve_s)
        self._drift = 1.0
        self._own: dict[int, float] = {}  # what a size has beside the drift

    def record(self, num_rows: int, seconds: float) -> None:
        """A step without prompts took so long."""
        ratio = min(seconds / self.of(num_rows), _LONGEST_OUTLIER)
        self._drift *= 1.0 + _NEW_TIME * (ratio - 1.0)
        self._own[num_rows] = self._own.get(num_rows, 1.0) * (1.0 + _NEW_OWN * (ratio - 1.0))

    def learn(self, num_rows: int, seconds: float) -> None:
        """As `record`, but the first of so many rows counts as it is."""
        if num_rows in self._curve_s:
            self.record(num_rows, seconds)
        else:
            self._curve_s[num_rows] = seconds / self._drift
            self._rows = sorted(self._curve_s)

    def of(self, num_rows: float) -> float:
        """Between two sizes of the start, and beyond the last one, on the line through both, corrected."""
        return self._line(num_rows) * self._drift * self._own.get(round(num_rows), 1.0)

    def _line(self, num_rows: float) -> float:
        rows, times_s = self._rows, self._curve_s
        if len(rows) == 1:
            return times_s[rows[0]]
        place = min(max(bisect_right(rows, num_rows), 1), len(rows) - 1)
        low, high = rows[place - 1], rows[place]
        slope = max(0.0, times_s[high] - times_s[low]) / (high - low)
        return times_s[low] + slope * (num_rows - low)


class Acceptance:
    """Recent shares: of drafts that were right after all before them were, and of sequences with any."""

    def __init__(self, most: int) -> None:
        self._reached = [_PRIOR_WEIGHT] * most
        self._accepted = [_PRIOR_WEIGHT * FIRST_GUESS] * most
        self._asked = self._answered = 1.0

    def begin(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Starts anew from counts by place, as in `DraftCounts`."""
        for place, (num_reached, num_accepted) in enumerate(zip(reached, accepted, strict=True)):
            self._reached[place] = _PRIOR_WEIGHT + num_reached
            self._accepted[place] = _PRIOR_WEIGHT * FIRST_GUESS + num_accepted

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's drafts were verified."""
        for place in range(min(num_drafted, num_accepted + 1)):
            self._reached[place] = _KEPT * self._reached[place] + 1.0
            self._accepted[place] = _KEPT * self._accepted[place] + (place < num_accepted)

    def record_coverage(self, num_asked: int, num_answered: int) -> None:
        """The drafter was asked for so many sequences, and knew something of so many."""
        self._asked = _KEPT * self._asked + num_asked
        self._answered = _KEPT * self._answered + num_answered

    def loosen(self) -> None:
        """What comes next shall count, whatever was before."""
        for place, reached in enumerate(self._reached):
            if reached > _PAST_WEIGHT:
                self._accepted[place] *= _PAST_WEIGHT / reached
                self._reached[place] = _PAST_WEIGHT

    @property
    def coverage(self) -> float:
        return max(_LEAST_COVERAGE, self._answered / self._asked)

    def gain(self, num: int) -> float:
        """Drafts accepted of `num`, on the average."""
        total, chance = 0.0, 1.0
        for place in range(num):
            chance *= self._accepted[place] / self._reached[place]
            total += chance
        return total


class Policy:
    """See the module. Before `begin` it answers 0. With `adapts` false it always answers `most`."""

    def __init__(self, most: int, *, adapts: bool = True) -> None:
        self.most, self.adapts = most, adapts
        self.acceptance = Acceptance(most)
        self.times: StepTimes | None = None
        self.reason = "the engine starts"
        self.forced: int | None = None  # so many, while it is set
        self._draft_times: dict[int, StepTimes] = {}  # of k drafts, by the number of sequences
        self._num_since_look = 0
        self._best = 0

    def begin(self, times_s: Mapping[int, float]) -> None:
        """The engine serves from now on; `times_s` as `measure_step_times` gave them."""
        self.times = StepTimes(times_s or {1: 1.0})
        self.reason = "no step yet" if self.adapts else "--no-draft-adapt"

    def choose(self, num_sequences: int) -> int:
        """Drafts for each of so many sequences."""
        if self.times is None:
            return 0
        if self.forced is not None:
            return self.forced
        if not self.adapts:
            return self.most
        base_s = self.times.of(num_sequences)
        best, best_gain = 0, LEAST_GAIN
        for num in range(1, self.most + 1):
            gain = self._gain(num, num_sequences, base_s)
            if gain > best_gain * (LEAST_MORE if best else 1.0):
                best, best_gain = num, gain
        self._explain(best, num_sequences, best_gain)
        if best:
            self._num_since_look = 0
            return best
        self._num_since_look += 1
        if not self._may_look(num_sequences, base_s):
            return 0
        self._num_since_look = 0
        self.acceptance.loosen()
        return min(LOOK_TOKENS, self.most)

    def _may_look(self, num_sequences: int, base_s: float) -> bool:
        """Not so soon after the last that looks would cost more than their share of the time."""
        if self._num_since_look < STEPS_BETWEEN_LOOKS:
            return False
        assert self.times is not None, "asked before the engine serves"
        num = min(LOOK_TOKENS, self.most)
        look_s = self.times.of(num_sequences * (1 + num)) + self.draft_time(num, num_sequences) - base_s
        return look_s <= LOOK_SHARE * base_s * self._num_since_look

    def record_draft_time(self, num: int, num_sequences: int, seconds: float) -> None:
        """Proposing `num` drafts each for so many sequences took so long."""
        known = self._draft_times.get(num)
        if known is None:
            self._draft_times[num] = StepTimes({num_sequences: seconds})
        else:
            known.learn(num_sequences, seconds)

    @property
    def timed_drafts(self) -> list[int]:
        """Numbers of drafts of which a time is known."""
        return sorted(self._draft_times)

    def draft_time(self, num: int, num_sequences: float) -> float:
        """Seconds of so many drafts each; of a number that was never proposed, the longest of the others."""
        known = self._draft_times.get(num)
        if known is not None:
            return known.of(num_sequences)
        return max((times.of(num_sequences) for times in self._draft_times.values()), default=0.0)

    def _gain(self, num: int, num_sequences: int, base_s: float) -> float:
        """Tokens a second with `num` drafts each, as a multiple of those without, where there are drafts.

        The drafter is paid for in every step, also in those in which it knows nothing.
        """
        assert self.times is not None, "asked before the engine serves"
        covered = self.acceptance.coverage * num_sequences
        with_drafts = max(1.0, covered)
        draft_s = self.draft_time(num, num_sequences) / min(1.0, covered)
        step_s = self.times.of(num_sequences + with_drafts * num) + draft_s
        tokens = 1.0 + with_drafts * self.acceptance.gain(num) / num_sequences
        return tokens * base_s / step_s

    def _explain(self, best: int, num_sequences: int, gain: float) -> None:
        if best == self._best and self._num_since_look:
            return  # the words for no drafts stay the same, and cost nothing
        self._best = best
        if best:
            expected = 1.0 + self.acceptance.gain(best)
            self.reason = (
                f"{best} each for {num_sequences}: {expected:.2f} tokens where there are drafts, {gain:.2f}x"
            )
        else:
            self.reason = f"none for {num_sequences}: no number of drafts would gain {LEAST_GAIN - 1.0:.0%}"
