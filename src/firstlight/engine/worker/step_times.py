"""How long a step of m rows takes, measured at the start: T(m), by which drafting is judged later.

The rows are real ones, of as many running sequences, through scheduler, model and sampler; drafts are timed
on some of them. Invariant: nothing of it stays: no sequence, no cached page, no count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Rows
from math import inf

from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.drafter import Drafter, TreeDrafter
from firstlight.engine.speculation.shape import Shape, chain
from firstlight.engine.speculation.speculation import Speculation

ROWS = (1, 2, 4, 8, 16)
MORE_ROWS = (32, 64)  # of engines that draft: a few drafts each for several sequences
BUDGET_S = 0.25  # longer steps are not waited for: they follow from the line through the last two sizes
DRAFT_BUDGET_S = 0.1  # for the drafts' own times
_STEPS, _MOST_STEPS = 2, 4  # of each size; the quickest one counts
# A step that long is run once, if it takes no longer than two of half its size; and more than two are run
# while they take less together: of quick steps two are easily both disturbed.
_LONG_S = 0.02
_STRIDE = 7919
NUM_SEQUENCES = (1, 4)  # that drafts are timed for: a line through both tells of more
_DRAFT_RUNS = 2  # of each number of drafts; the quicker one counts


def measure_step_times(core: EngineCore, vocab_size: int) -> dict[int, float]:
    """Seconds of a decode step of 1, 2, 4, … rows; none longer than that of more rows.

    It ends at 16 (64 where there is a drafter), at what the engine can run at once, or when the time is up.
    """
    until_s = time.monotonic() + BUDGET_S
    sizes = ROWS if core.speculation is None else ROWS + MORE_ROWS
    longest = 1 + _MOST_STEPS * len(sizes)  # tokens of the sequence that is there from the beginning
    most = core.scheduler.most_running(1 + longest)
    params = SamplingParams(temperature=0.0, max_tokens=longest, seed=0, ignore_eos=True)
    names: list[str] = []
    measured: dict[int, float] = {}
    for size in itertools.takewhile(lambda rows: rows <= most, sizes):
        while len(names) < size:
            token = _STRIDE * (len(names) + 1) % vocab_size  # different ones, so that experts differ too
            names.append(f"step-time-{len(names)}")
            core.handle(Submit(names[-1], [token], params))
        times_s = _looks_at(core, size, max(_LONG_S, 2 * measured.get(size // 2, 0.0)))
        if not times_s:
            break
        measured[size] = min(times_s)
        if core.speculation is not None and size in NUM_SEQUENCES:
            drafts_s = time.monotonic()
            time_drafts(core.speculation, core.scheduler.decoding_sequences(), drafts_s + DRAFT_BUDGET_S)
            until_s += time.monotonic() - drafts_s
        if time.monotonic() + 2 * min(times_s) > until_s:
            break  # the next size is twice this one, and may take twice as long
    core.handle(Abort(names))
    while core.step() is not None:
        pass
    core.scheduler.forget()
    return _never_falling(measured)


def _looks_at(core: EngineCore, size: int, in_line_s: float) -> list[float]:
    """Seconds of two steps or some more; of one where it is long, but within `in_line_s`."""
    times_s: list[float] = []
    for number in range(1, _MOST_STEPS + 1):
        seconds = _step_of(core, size)
        if seconds is not None:
            times_s.append(seconds)
            if _LONG_S < seconds <= in_line_s:
                break
        if number >= _STEPS and sum(times_s) >= _LONG_S:
            break
    return times_s


def _step_of(core: EngineCore, size: int) -> float | None:
    """Seconds of the next step; None when it was of another size."""
    step = core.step()
    return step.stats.step_s if step is not None and step.stats.step_sequences == size else None


def _never_falling(measured: dict[int, float]) -> dict[int, float]:
    """Fewer rows take no longer than more: a size that did was disturbed every time."""
    sizes = list(measured)
    shortest_s = itertools.accumulate((measured[size] for size in reversed(sizes)), min)
    return dict(zip(sizes, reversed(list(shortest_s)), strict=True))


def time_drafts(speculation: Speculation, sequences: Rows[Sequence], until_s: float) -> None:
    """Drafts for all of `sequences`, from one each to as many as a step may carry.

    Of a drafter with weights alone, and until the time is up: a number that was not timed is thought to take
    as long as the longest that was. However busy the machine is: drafts for several sequences, or several of
    one, count as no more than as many of one.
    """
    drafter, policy = speculation.drafter, speculation.policy
    if not drafter.is_model or not sequences:
        return
    one_s = len(sequences) * policy.draft_time(chain(1), 1) if policy.timed_drafts else inf
    for shape in policy.to_be_timed:
        times_s = [_time_of(drafter, sequences, shape) for _ in range(_DRAFT_RUNS)]
        seconds = min(*times_s, shape.num_expanded * one_s)
        one_s = min(one_s, seconds / shape.num_expanded)
        policy.record_draft_time(shape, len(sequences), seconds)
        if time.monotonic() + _DRAFT_RUNS * 2 * min(times_s) > until_s:
            return


def _time_of(drafter: Drafter, sequences: Rows[Sequence], shape: Shape) -> float:
    started_s = time.perf_counter()
    if shape.is_tree:
        assert isinstance(drafter, TreeDrafter), "trees of a drafter that makes none"
        drafter.propose_trees(sequences, shape)
    else:
        drafter.propose(sequences, shape.depth)
    return time.perf_counter() - started_s
