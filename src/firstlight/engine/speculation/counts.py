"""How many drafts were made and accepted, by place, and the figures that follow; never without their k.

Filled by `Speculation`, sent with every step's `EngineStats`, read by /metrics, /server_info and the
benchmarks. Torch-free. Invariant: a draft counts when it is verified, an accepted one when it is answered.
"""

from __future__ import annotations

import msgspec


class DraftCounts(msgspec.Struct, array_like=True):
    """Totals since start. Lists are by the draft's place after the last known token, the first one first."""

    drafter: str = ""
    most: int = 0  # k: drafts that a step may carry of a sequence
    now: int = 0  # what was chosen last; 0: no drafts
    reason: str = ""  # of that choice
    num_verified: int = 0  # sequences' steps with drafts
    num_plain: int = 0  # sequences' steps without
    drafted: list[int] = msgspec.field(default_factory=list)
    reached: list[int] = msgspec.field(default_factory=list)  # verified with all before them accepted
    accepted: list[int] = msgspec.field(default_factory=list)
    propose_s: float = 0.0  # in the drafter

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's step."""
        if not num_drafted:
            self.num_plain += 1
            return
        self.num_verified += 1
        while len(self.drafted) < num_drafted:
            self.drafted.append(0)
            self.reached.append(0)
            self.accepted.append(0)
        for place in range(num_drafted):
            self.drafted[place] += 1
            self.reached[place] += place <= num_accepted
            self.accepted[place] += place < num_accepted

    def forget(self) -> None:
        """What was run so far was no user's."""
        self.num_verified = self.num_plain = 0
        self.drafted, self.reached, self.accepted = [], [], []
        self.propose_s = 0.0


def figures(counts: DraftCounts) -> dict[str, object]:
    """What the counts say, by name; None where nothing was verified."""
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    verified, plain = counts.num_verified, counts.num_plain
    return {
        "drafter": counts.drafter,
        "draft_tokens": counts.most,
        "draft_tokens_now": counts.now,
        "reason": counts.reason,
        "num_verified": verified,
        "num_plain": plain,
        "num_drafted": drafted,
        "num_accepted": accepted,
        "acceptance_length": _ratio(verified + accepted, verified),
        "tokens_per_step": _ratio(verified + accepted + plain, verified + plain),
        "accepted_per_drafted": _ratio(accepted, drafted),
        "acceptance_by_place": [_ratio(a, d) for a, d in zip(counts.accepted, counts.drafted, strict=True)],
        "conditional_acceptance_by_place": [
            _ratio(a, r) for a, r in zip(counts.accepted, counts.reached, strict=True)
        ],
        "propose_s": round(counts.propose_s, 3),
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
