"""A sequence's drafts on their way through a step: cut to what it can hold, and settled when it has run.

Called by the scheduler. Invariant: drafts push nobody out, and what was not accepted leaves no page.
"""

from __future__ import annotations

from firstlight.engine.memory import SequenceMemory
from firstlight.engine.messages import SequenceOutput
from firstlight.engine.request import Sequence
from firstlight.engine.tree import num_within, path_of


def cut_drafts(sequence: Sequence, spare: int, memory: SequenceMemory, num_running: int) -> None:
    """Keeps those that fit into `spare` rows of the step, its length, and pages that nobody will miss."""
    in_a_row = sequence.max_len - len(sequence.tokens) - 1
    if sequence.parents:
        num = num_within(sequence.parents, max(0, spare), in_a_row)
    else:
        num = max(0, min(len(sequence.drafts), spare, in_a_row))
    if not memory.has_spare_pages(sequence, num, reserved=num_running):
        num = 0
    del sequence.drafts[num:], sequence.parents[num:]


def settle_drafts(sequence: Sequence, output: SequenceOutput, memory: SequenceMemory) -> None:
    """The step has run, and `output` has what was accepted."""
    output.num_drafted = len(sequence.drafts)
    if sequence.parents:
        accepted = output.token_ids[: output.num_accepted]
        memory.gather(sequence, path_of(sequence.drafts, sequence.parents, accepted))
    sequence.forget_drafts()
    memory.settle(sequence, output.num_accepted)
