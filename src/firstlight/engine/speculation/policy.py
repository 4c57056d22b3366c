"""How many drafts a step carries: as many as pay, by what steps take and by what was accepted lately.

Chains of every length are weighed, and where trees may be made, those of a few sizes. Invariant: without
drafts that pay it answers none, but for a look now and then at whether they would; and so it looks at trees
where a chain is better.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from firstlight.engine.speculation.acceptance import Acceptance, TreeAcceptance
from firstlight.engine.speculation.common_prefix import common_prefix
from firstlight.engine.speculation.metrics import NO_STEP
from firstlight.engine.speculation.shape import NOTHING, Shape, chain

_NEW_TIME = 0.1  # weight of a new step in the running mean of all
_NEW_OWN = 0.02  # and in that of its size
_LONGEST_OUTLIER = 3.0  # a step of that many times the mean counts as no more
# A gain of less is not worth the risk that the estimate is wrong.
LEAST_GAIN = 1.02
LEAST_MORE = 1.005  # for each draft more, or the next larger tree
# While no drafts are made nothing is learnt of them, and the times of steps move slowly: a choice of none
# stands for so many steps of as many sequences.
STEPS_BETWEEN_CHOICES = 8
# While no drafts are made, or no trees: steps between two looks, at least.
STEPS_BETWEEN_LOOKS = 64
LOOK_TOKENS = 2
LOOK_SHARE = 0.01  # of the time, at most


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
        if num_rows > self._rows[-1]:
            # Beyond what was measured the line is a guess, and the first such step knows better. It may be an
            # outlier, though: so many rows take no longer than as many steps of one.
            self.learn(num_rows, min(seconds, num_rows / self._rows[0] * self.of(self._rows[0])))
            return
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


class Policy:
    """See the module. Before `begin` it answers none. With `adapts` false it always answers the largest.

    `most`: k, the drafts one behind the other. `tree`: the largest tree, where there are any.
    """

    def __init__(self, most: int, *, tree: Shape | None = None, adapts: bool = True) -> None:
        self.most, self.adapts = most, adapts
        self.largest = tree or chain(most)
        self.acceptance = Acceptance(most)
        self.tree_acceptance = TreeAcceptance(tree) if tree is not None else None
        self.times: StepTimes | None = None
        self.reason = "the engine starts"
        self.forced: Shape | None = None  # this one, while it is set
        chains = [chain(num) for num in range(1, most + 1)]
        self.to_be_timed = (
            [*chains, tree] if tree else chains
        )  # at the start: trees of one depth take as long
        self._shapes = chains + (_trees(tree) if tree else [])
        self._draft_times: dict[
            tuple[int, int], StepTimes
        ] = {}  # of a depth and top-k, by number of sequences
        self._looks = [_Look(chain(min(LOOK_TOKENS, most)))] + ([_Look(tree)] if tree else [])
        self.chosen = NOTHING  # last, by itself and not for a look; the reason is of this one
        self._none_for = 0  # so many sequences, while a choice of none stands
        self._num_steps = 1  # since the last choice, that one included

    def begin(self, times_s: Mapping[int, float]) -> None:
        """The engine serves from now on; `times_s` as `measure_step_times` gave them."""
        self.times = StepTimes(times_s or {1: 1.0})
        self.chosen = NOTHING if self.adapts else self.largest
        self.reason = NO_STEP if self.adapts else "--no-draft-adapt"

    def choose(self, num_sequences: int) -> Shape:
        """Drafts for each of so many sequences."""
        if self.times is None:
            return NOTHING
        if self.forced is not None:
            return self.forced
        if not self.adapts:
            return self.largest
        if num_sequences == self._none_for and self._num_steps < STEPS_BETWEEN_CHOICES:
            self._num_steps += 1
            return NOTHING
        best = self._best_for(num_sequences)
        num_steps, self._num_steps = self._num_steps, 1
        self._none_for = 0 if best.depth else num_sequences
        for look in self._looks:
            look.num_steps = 0 if look.is_seen_by(best) else look.num_steps + num_steps
            if self._may_look(look, best, num_sequences):
                look.num_steps = self._none_for = 0
                self._loosen(look.shape)
                return look.shape
        return best

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's chain was verified."""
        self.acceptance.record(num_drafted, num_accepted)

    def record_tree(self, num_nodes: int, path: list[int], likeliest: list[int]) -> None:
        """One sequence's tree was verified. `path`: the places of those accepted; `likeliest`: the chain in
        it."""
        self.acceptance.record(len(likeliest), common_prefix(path, likeliest))
        if self.tree_acceptance is not None:
            self.tree_acceptance.record(num_nodes, path)

    def record_draft_time(self, shape: Shape, num_sequences: int, seconds: float) -> None:
        """Proposing drafts of this shape for so many sequences took so long."""
        known = self._draft_times.get(shape[:2])
        if known is None:
            self._draft_times[shape[:2]] = StepTimes({num_sequences: seconds})
        else:
            known.learn(num_sequences, seconds)

    def expected(self, shape: Shape) -> float:
        """Drafts accepted of this shape, on the average."""
        if shape.is_tree and self.tree_acceptance is not None:
            return self.tree_acceptance.gain(shape.nodes)
        return self.acceptance.gain(shape.depth)

    def _best_for(self, num_sequences: int) -> Shape:
        """What gains most by what is known now, and why."""
        assert self.times is not None, "asked before the engine serves"
        base_s = self.times.of(num_sequences)
        best, best_gain = NOTHING, LEAST_GAIN
        for shape in self._shapes:
            gain = self._gain(shape, num_sequences, base_s)
            if gain > best_gain * (LEAST_MORE if best.depth else 1.0):
                best, best_gain = shape, gain
        self._explain(best, num_sequences, best_gain)
        return best

    def _may_look(self, look: _Look, best: Shape, num_sequences: int) -> bool:
        """Not so soon after the last that looks would cost more than their share of the time."""
        if look.num_steps < STEPS_BETWEEN_LOOKS:
            return False
        assert self.times is not None, "asked before the engine serves"
        base_s = self.times.of(num_sequences)
        more_s = self._step_time(look.shape, num_sequences) - self._step_time(best, num_sequences)
        return more_s <= LOOK_SHARE * base_s * look.num_steps

    def _step_time(self, shape: Shape, num_sequences: int) -> float:
        """With the drafter's, where it knows something of every sequence."""
        assert self.times is not None, "asked before the engine serves"
        rows_s = self.times.of(num_sequences * (1 + shape.nodes))
        return rows_s + (self.draft_time(shape, num_sequences) if shape.depth else 0.0)

    def _loosen(self, shape: Shape) -> None:
        if shape.is_tree and self.tree_acceptance is not None:
            self.tree_acceptance.loosen()
        else:
            self.acceptance.loosen()

    @property
    def timed_drafts(self) -> list[Shape]:
        """Those of `to_be_timed` of which a time is known."""
        return [shape for shape in self.to_be_timed if shape[:2] in self._draft_times]

    def draft_time(self, shape: Shape, num_sequences: float) -> float:
        """Seconds of such drafts each; of a shape that was never proposed, the longest of the others."""
        known = self._draft_times.get(shape[:2])
        if known is not None:
            return known.of(num_sequences)
        return max((times.of(num_sequences) for times in self._draft_times.values()), default=0.0)

    def _gain(self, shape: Shape, num_sequences: int, base_s: float) -> float:
        """Tokens a second with such drafts each, as a multiple of those without, where there are drafts.

        The drafter is paid for in every step, also in those in which it knows nothing.
        """
        assert self.times is not None, "asked before the engine serves"
        covered = self.acceptance.coverage * num_sequences
        with_drafts = max(1.0, covered)
        draft_s = self.draft_time(shape, num_sequences) / min(1.0, covered)
        step_s = self.times.of(num_sequences + with_drafts * shape.nodes) + draft_s
        tokens = 1.0 + with_drafts * self.expected(shape) / num_sequences
        return tokens * base_s / step_s

    def _explain(self, best: Shape, num_sequences: int, gain: float) -> None:
        if best == self.chosen and self._looks[0].num_steps:
            return  # the words for no drafts stay the same, and cost nothing
        self.chosen = best
        if best.depth:
            expected = 1.0 + self.expected(best)
            tokens = f"{expected:.2f} tokens where there are drafts"
            self.reason = f"{best.words} each for {num_sequences}: {tokens}, {gain:.2f}x"
        else:
            self.reason = f"none for {num_sequences}: no number of drafts would gain {LEAST_GAIN - 1.0:.0%}"
        if self.largest.is_tree and not best.is_tree:
            self.reason += self._why_no_tree(num_sequences)

    def _why_no_tree(self, num_sequences: int) -> str:
        assert self.times is not None, "asked before the engine serves"
        base_s = self.times.of(num_sequences)
        gains = [(self._gain(s, num_sequences, base_s), s) for s in self._shapes if s.is_tree]
        gain, shape = max(gains)
        return f"; {shape.words} would give {1.0 + self.expected(shape):.2f} tokens, {gain:.2f}x"


class _Look:
    """At drafts that were not made for `num_steps`, to see whether they would pay by now."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_steps = 0

    def is_seen_by(self, shape: Shape) -> bool:
        """Whether what becomes of such drafts tells of these."""
        return shape.nodes >= self.shape.nodes if self.shape.is_tree else shape.depth > 0


def _trees(largest: Shape) -> list[Shape]:
    """Of a few sizes, the smallest first: half the nodes each time, but more than the longest chain."""
    sizes = [largest.nodes]
    while sizes[-1] // 2 > largest.depth:
        sizes.append(sizes[-1] // 2)
    return [largest._replace(nodes=size) for size in reversed(sizes)]
