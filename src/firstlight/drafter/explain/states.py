"""States of one stage beside those of the reference: which layer they are, which row, and which ranks' part.

Invariant: rows are compared with the reference's state of the very same tokens.

Shapes: T tokens, C captured states, L blocks, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F

from firstlight.drafter.explain.evidence import LayerMatch, StatesMatch, TeacherMatch
from firstlight.drafter.target import Ends

Pair = tuple[torch.Tensor, torch.Tensor]  # states [T, C, H] of a stage, reference [T, L + 1, H]


def match_states(stage: str, layers: Sequence[int], pairs: Sequence[Pair]) -> StatesMatch:
    """Each captured state beside every layer of the reference, over all documents."""
    found = torch.cat([states.float() for states, _ in pairs])
    reference = torch.cat([expected for _, expected in pairs])
    matches = []
    for place, layer in enumerate(layers):
        cosines = F.cosine_similarity(found[:, place, None], reference, dim=-1).mean(0)
        best = int(cosines.argmax())
        gap = (found[:, place] - reference[:, layer]).norm() / reference[:, layer].norm().clamp(min=1e-9)
        matches.append(
            LayerMatch(
                layer=layer,
                cosine=float(cosines[layer]),
                relative_l2=float(gap),
                best_layer=best,
                best_cosine=float(cosines[best]),
            )
        )
    offset, cosine = _row_offset(layers, pairs)
    return StatesMatch(
        stage=stage,
        num_tokens=len(found),
        layers=matches,
        row_offset=offset,
        row_offset_cosine=cosine,
    )


def _row_offset(layers: Sequence[int], pairs: Sequence[Pair]) -> tuple[int, float]:
    """By how many rows the states are late (0: in place), and how well they fit there."""
    best = (0, -1.0)
    for offset in (0, -1, 1):
        total, num = 0.0, 0
        for states, reference in pairs:
            first, last = max(offset, 0), len(states) + min(offset, 0)
            if first >= last:
                continue
            expected = reference[first - offset : last - offset][:, list(layers)]
            total += float(F.cosine_similarity(states[first:last].float(), expected, dim=-1).sum())
            num += (last - first) * len(layers)
        cosine = total / max(num, 1)
        if cosine > best[1] + 1e-3:
            best = (offset, cosine)
    return best


def match_ranks(
    match: StatesMatch, layers: Sequence[int], ranks: Sequence[torch.Tensor], reference: torch.Tensor
) -> StatesMatch:
    """Adds what the states [T, C, H] of several ranks say of each other.

    Every rank must hold the same. One that keeps its own part of a sum which was not yet made differs from
    the others, and the mean of all of them is nearer to the reference than any.
    """
    stacked = torch.stack([states.float() for states in ranks])
    mean = stacked.mean(0)
    gap = (stacked - mean).norm() / (mean.norm() * len(ranks) ** 0.5).clamp(min=1e-9)
    cosine = F.cosine_similarity(mean, reference[:, list(layers)], dim=-1).mean()
    return msgspec.structs.replace(match, ranks_gap=float(gap), ranks_mean_cosine=float(cosine))


def match_teacher(
    stage: str,
    ends: Ends,
    norm_eps: float,
    final_TH: torch.Tensor,
    chosen_T: torch.Tensor,
) -> TeacherMatch:
    """Whether the target's own norm and head on its last state give the tokens that it chose."""
    wide = final_TH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    found = (wide * scale * ends.norm @ ends.head.t()).argmax(-1)
    share = float((found == chosen_T).float().mean()) if len(chosen_T) else 0.0
    return TeacherMatch(stage=stage, num=len(chosen_T), agreement=share)
