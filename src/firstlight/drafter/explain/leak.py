"""Whether a draft depends on what stands after it: then training has seen the answer to what it asks.

Invariant: only rows that the draft may not see are changed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from firstlight.drafter.explain.samples import Sample
from firstlight.drafter.packing import Row
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_unroll import UnrollRows

NUM_STEPS = 2


@torch.no_grad()
def leak_of(drafter: Eagle3Drafter, sample: Sample) -> float:
    """The largest change of logits, in units of their spread, when all that comes later is replaced.

    The rows are those that training makes of a document, so that its mask is what is tried.
    """
    states = sample.for_layers(drafter.config.state_layers)
    num = len(states)
    supervised = torch.zeros(num, dtype=torch.bool)
    supervised[sample.queries] = True
    tokens = torch.tensor(sample.tokens[1:])
    row = Row(
        states_TCH=states,
        final_TH=states[:, -1],
        tokens_T=tokens,
        wanted_T=tokens,
        supervised_T=supervised,
        positions_T=torch.arange(num),
        document_T=torch.zeros(num, dtype=torch.int64),
        families_D=("",),
    )
    rows = row.unroll_rows()
    place = len(rows.queries_Q) // 2
    before = _logits(drafter, rows, place)
    after = _logits(drafter, _changed(rows, int(rows.queries_Q[place])), place)
    return float((after - before).abs().max() / before.std().clamp(min=1e-9))


def _changed(rows: UnrollRows, index: int) -> UnrollRows:
    """Other states behind `index`, and other tokens behind the last one that a draft from it embeds."""
    states, tokens = rows.states_TCH.clone(), rows.tokens_T.clone()
    states[index + 1 :] = states[: len(states) - index - 1].flip(0)
    tokens[index + NUM_STEPS :] = tokens[0]
    return replace(rows, states_TCH=states, tokens_T=tokens)


def _logits(drafter: Eagle3Drafter, rows: UnrollRows, place: int) -> torch.Tensor:
    return torch.stack([drafter.logits(output[place]) for output in drafter.unroll(rows, NUM_STEPS)])
