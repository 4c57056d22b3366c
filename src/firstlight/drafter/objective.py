"""What training minimises and what it reports: soft cross-entropy on the draft vocabulary, and honest
accuracy.

A position whose right token is not in the draft vocabulary has no loss and counts as a failure: the drafter
can never say it. Invariant: accuracy is against the target's choice among all its tokens.

Shapes: Q indices that are drafted from, S draft steps, R draft vocabulary, V target vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from firstlight.drafter.draft_loss import CROSS_ENTROPY, Aim, score_drafts
from firstlight.drafter.packing import Row
from firstlight.drafter.target import Ends
from firstlight.models.eagle3 import Eagle3Drafter


@dataclass(frozen=True)
class Outcome:
    """`loss`: weighted over the drafts. `valid_SQ`: there is a right token; `correct_SQ`: it was given."""

    loss: torch.Tensor
    valid_SQ: torch.Tensor
    correct_SQ: torch.Tensor
    losses_S: torch.Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's final norm and the rows of its head that the draft vocabulary has."""

    norm: torch.Tensor
    head_RH: torch.Tensor
    norm_eps: float
    place_V: torch.Tensor  # draft id of each target token, -1 outside
    temperature: float = 1.0  # below 1 its distribution is sharper

    def log_probs(self, final_QH: torch.Tensor) -> torch.Tensor:
        """The target's distribution over the draft vocabulary, given that its token is in there [Q, R]."""
        return F.log_softmax(self._logits(final_QH), -1)

    def probs(self, final_QH: torch.Tensor) -> torch.Tensor:
        """The same as probabilities."""
        return F.softmax(self._logits(final_QH), -1)

    def to(self, device: str) -> Teacher:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("norm", "head_RH", "place_V")}
        return replace(self, **moved)

    def _logits(self, final_QH: torch.Tensor) -> torch.Tensor:
        wide = final_QH.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        # Under autocast the product is bfloat16, too coarse for probabilities.
        return (wide * (scale / self.temperature) * self.norm @ self.head_RH.t()).float()


def make_teacher(ends: Ends, ids_R: torch.Tensor, norm_eps: float) -> Teacher:
    """The teacher of a draft vocabulary."""
    place = torch.full((len(ends.head),), -1, dtype=torch.int64)
    place[ids_R] = torch.arange(len(ids_R))
    return Teacher(ends.norm, ends.head[ids_R].contiguous(), norm_eps, place)


def unrolled(
    drafter: Eagle3Drafter,
    teacher: Teacher,
    row: Row,
    num_steps: int,
    step_decay: float,
    loss: str = CROSS_ENTROPY,
) -> Outcome:
    """Runs the training-time test over a row. The mean loss of draft i has the weight `step_decay` ** i."""
    rows = row.unroll_rows()
    queries = rows.queries_Q
    with torch.no_grad():
        probs_QR = teacher.probs(row.final_TH[queries])
    # Every query is a supervised index, so that index's distribution is the query's.
    asked_T = torch.zeros_like(row.tokens_T)
    asked_T[queries] = torch.arange(len(queries), device=queries.device)
    place_T = teacher.place_V[row.wanted_T.clamp(min=0)]
    # Norms leave float32; the head's product is the largest, and takes the type of the others.
    kind = queries.device.type
    compute_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    losses, valids, corrects = [], [], []
    for step, output in enumerate(drafter.unroll(rows, num_steps)):
        later, valid = row.valid(queries, step)
        right = place_T[later]
        aim = Aim(probs_QR, asked_T[later], valid & (right >= 0), loss)
        scored = score_drafts(drafter.norm(output).to(compute_dtype), drafter.lm_head.weight, aim)
        losses.append(scored.loss)
        valids.append(valid)
        corrects.append(valid & (scored.best_Q == right))
    losses_S = torch.stack(losses)
    weights = torch.tensor([step_decay**step for step in range(num_steps)], device=losses_S.device)
    return Outcome((losses_S * weights).sum(), torch.stack(valids), torch.stack(corrects), losses_S.detach())


@dataclass
class Tally:
    """Counts over rows. `reached[i]`: drafts i whose earlier ones were right; `accepted[i]`: also right."""

    num_steps: int

    def __post_init__(self) -> None:
        self.valid = [0] * self.num_steps
        self.correct = [0] * self.num_steps
        self.reached = [0] * self.num_steps
        self.accepted = [0] * self.num_steps

    def add(self, outcome: Outcome) -> None:
        """Counts the drafts of one row."""
        alive = torch.ones_like(outcome.valid_SQ[0])
        for step in range(self.num_steps):
            valid, correct = outcome.valid_SQ[step], outcome.correct_SQ[step]
            self.valid[step] += int(valid.sum())
            self.correct[step] += int(correct.sum())
            alive = alive & valid
            self.reached[step] += int(alive.sum())
            alive = alive & correct
            self.accepted[step] += int(alive.sum())

    def counts(self) -> list[float]:
        """All counts in a row, which can be added to another tally's."""
        return [float(n) for n in (*self.valid, *self.correct, *self.reached, *self.accepted)]

    @classmethod
    def of(cls, counts: list[float]) -> Tally:
        """The tally that `counts` gave, or their sum."""
        tally = cls(len(counts) // 4)
        parts = [[int(n) for n in counts[i :: tally.num_steps]] for i in range(tally.num_steps)]
        tally.valid, tally.correct, tally.reached, tally.accepted = (
            [part[kind] for part in parts] for kind in range(4)
        )
        return tally

    @property
    def accuracy(self) -> list[float]:
        """Right drafts of each step, whatever came before."""
        return [c / max(v, 1) for c, v in zip(self.correct, self.valid, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """Right drafts of each step, of those whose earlier ones were right."""
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Tokens a target step gives, the one of the target's own included: 1 + sum of products."""
        length, chance = 1.0, 1.0
        for rate in self.conditional:
            chance *= rate
            length += chance
        return length
