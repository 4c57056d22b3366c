"""How long drafts take, measured at the start on sequences that are being answered.

Called by `engine.step_times`, which has such sequences. Invariant: drafts made here are thrown away, and only
the policy learns of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from math import inf

from firstlight.engine.request import Sequence
from firstlight.engine.speculation.drafter import Drafter, TreeDrafter
from firstlight.engine.speculation.shape import Shape, chain
from firstlight.engine.speculation.speculation import Speculation

NUM_SEQUENCES = (1, 4)  # a line through both tells of more
_TIMES = 2  # of each number of drafts; the quicker one counts


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
    shapes = [chain(num) for num in range(1, policy.most + 1)]
    for shape in [*shapes, policy.largest] if policy.largest.is_tree else shapes:
        times_s = [_time_of(drafter, sequences, shape) for _ in range(_TIMES)]
        seconds = min(*times_s, shape.num_expanded * one_s)
        one_s = min(one_s, seconds / shape.num_expanded)
        policy.record_draft_time(shape, len(sequences), seconds)
        if time.monotonic() + _TIMES * 2 * min(times_s) > until_s:
            return


def _time_of(drafter: Drafter, sequences: Rows[Sequence], shape: Shape) -> float:
    started_s = time.perf_counter()
    if shape.is_tree:
        assert isinstance(drafter, TreeDrafter), "trees of a drafter that makes none"
        drafter.propose_trees(sequences, shape)
    else:
        drafter.propose(sequences, shape.depth)
    return time.perf_counter() - started_s
