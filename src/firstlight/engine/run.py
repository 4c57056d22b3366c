"""What a step gave one sequence: its run of new tokens, cut where the sequence ends.

Called by the scheduler. A run is one token, or several when drafts were accepted. Invariant: token for token
the ends are those of as many steps of one token each.
"""

from __future__ import annotations

from firstlight.engine.messages import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_NUMBERS,
    SequenceOutput,
)
from firstlight.engine.request import NO_TOKEN, Sequence


def extend(sequence: Sequence, run: list[int]) -> SequenceOutput:
    """Appends a run up to the sequence's end: an end token, its length, or `NO_TOKEN`.

    All but the last token of `run` were drafts.
    """
    tokens = sequence.tokens
    output = SequenceOutput(sequence.request_id, run, num_cached_tokens=sequence.num_cached)
    for place, token in enumerate(run):
        if token == NO_TOKEN:
            output.token_ids = run[:place]
            output.finish_reason, output.error = FINISH_ERROR, NOT_NUMBERS
            break
        tokens.append(token)
        if sequence.output_counts is not None:
            sequence.output_counts[token] += 1
        if token in sequence.end_ids:
            output.finish_reason, output.stop_token_id = FINISH_STOP, token
        elif len(tokens) >= sequence.max_len:
            output.finish_reason = FINISH_LENGTH
        if output.finish_reason is not None:
            output.token_ids = run[: place + 1]
            break
    output.num_accepted = min(len(output.token_ids), len(run) - 1)
    return output
