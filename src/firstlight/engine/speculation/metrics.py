"""How many drafts were made and accepted, by place, and the figures that follow; never without their k.

Torch-free. Invariant: a draft counts when it is verified, an accepted one when it is answered.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

# Lengths of a sequence, in tokens: each bucket ends below its bound, the last one nowhere.
LENGTH_BOUNDS = (256, 1024, 4096)
LENGTH_NAMES = (*(f"below {bound}" for bound in LENGTH_BOUNDS), f"from {LENGTH_BOUNDS[-1]}")
HIT_NAMES = ("no", "yes")


class Share(msgspec.Struct, array_like=True):
    """Of some of the sequences' steps with drafts."""

    verified: int = 0
    drafted: int = 0
    accepted: int = 0


def _shares(num: int) -> list[Share]:
    return [Share() for _ in range(num)]


NO_STEP = "no step yet"  # the reason before the first choice


class DraftCounts(msgspec.Struct, array_like=True):
    """Totals since start. Lists are by the draft's place after the last known token, the first one first."""

    drafter: str = ""
    most: int = 0  # k: drafts that a step may carry of a sequence
    now: int = 0  # what was chosen last, looks aside; 0: no drafts
    reason: str = ""  # of that choice
    num_verified: int = 0  # sequences' steps with drafts
    num_plain: int = 0  # sequences' steps without
    # In a place of a tree all drafts together count once: one of them was right, or none.
    drafted: list[int] = msgspec.field(default_factory=list)
    reached: list[int] = msgspec.field(default_factory=list)  # verified with all before them accepted
    accepted: list[int] = msgspec.field(default_factory=list)
    propose_s: float = 0.0  # in the drafter
    by_length: list[Share] = msgspec.field(default_factory=lambda: _shares(len(LENGTH_NAMES)))
    by_hit: list[Share] = msgspec.field(default_factory=lambda: _shares(len(HIT_NAMES)))
    # Of trees; a chain is one with a top-k of 1, and as many nodes as drafts.
    top_k: int = 1
    most_nodes: int = 0
    nodes_now: int = 0
    num_drafted: int = 0  # nodes verified

    def record(
        self,
        num_drafted: int,
        num_accepted: int,
        num_tokens: int = 0,
        *,
        is_hit: bool = False,
        depth: int | None = None,
    ) -> None:
        """One sequence's step; it has `num_tokens`, the first of them from the prefix cache if `is_hit`.

        `depth`: how many of the drafts stood behind one another, where they were a tree.
        """
        if not num_drafted:
            self.num_plain += 1
            return
        self.num_verified += 1
        self.num_drafted += num_drafted
        for share in (self.by_length[bisect_right(LENGTH_BOUNDS, num_tokens)], self.by_hit[is_hit]):
            share.verified += 1
            share.drafted += num_drafted
            share.accepted += num_accepted
        num_places = num_drafted if depth is None else depth
        while len(self.drafted) < num_places:
            self.drafted.append(0)
            self.reached.append(0)
            self.accepted.append(0)
        for place in range(num_places):
            self.drafted[place] += 1
            self.reached[place] += place <= num_accepted
            self.accepted[place] += place < num_accepted

    def forget(self) -> None:
        """What was run so far was no user's."""
        self.num_verified = self.num_plain = self.num_drafted = 0
        self.drafted, self.reached, self.accepted = [], [], []
        self.propose_s = 0.0
        self.by_length, self.by_hit = _shares(len(LENGTH_NAMES)), _shares(len(HIT_NAMES))


def figures(counts: DraftCounts) -> dict[str, object]:
    """What the counts say, by name; None where nothing was verified."""
    drafted, accepted = counts.num_drafted, sum(counts.accepted)
    verified, plain = counts.num_verified, counts.num_plain
    return {
        "drafter": counts.drafter,
        "draft_tokens": counts.most,
        "draft_top_k": counts.top_k,
        "draft_nodes": counts.most_nodes or counts.most,
        "draft_tokens_now": counts.now,
        "draft_nodes_now": counts.nodes_now,
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
        "by_length": _by_name(LENGTH_NAMES, counts.by_length),
        "by_prefix_hit": _by_name(HIT_NAMES, counts.by_hit),
    }


def _by_name(names: tuple[str, ...], shares: list[Share]) -> dict[str, object]:
    """Acceptance of each kind that there was; where draft lengths differ, compare it with `drafted`."""
    return {
        name: {
            "num_verified": share.verified,
            "num_drafted": share.drafted,
            "num_accepted": share.accepted,
            "acceptance_length": _ratio(share.verified + share.accepted, share.verified),
        }
        for name, share in zip(names, shares, strict=True)
        if share.verified
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
