"""The engine's own drafts beside those of the reference, on the same tokens.

The engine is started with the drafter and asked as a server would ask it; what its drafter proposes is taken
down on the way. Invariant: a proposal is compared with what the reference drafts from the states of its very
tokens, whatever the engine drafted before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from firstlight.drafter.chain import eagle_proposer
from firstlight.drafter.explain.evidence import DraftMatch
from firstlight.drafter.explain.variants import Variant
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter

FIRST, LATER, CACHED = "first", "later", "cached"
ROUNDS = 16  # of a document, that are compared
VARIANT_DOCUMENTS = 2
STALE = "stale-keys"
STALE_WHAT = "keys of accepted drafts kept as they were drafted"


@dataclass(frozen=True)
class Proposal:
    """What the engine drafted when `num_tokens` of a document were known."""

    num_tokens: int
    drafts: tuple[int, ...]


@dataclass
class Drafted:
    """The proposals for one document, in their order; `states` of all its tokens [T, C, H], reference."""

    tokens: list[int]
    states: torch.Tensor
    num_cached: int = 0
    proposals: list[Proposal] = field(default_factory=list)

    def in_situation(self, situation: str) -> list[Proposal]:
        """Those of a document's first round, of its later ones, or all behind a prefix that was cached."""
        if self.num_cached:
            return self.proposals if situation == CACHED else []
        parts = {FIRST: self.proposals[:1], LATER: self.proposals[1:]}
        return parts.get(situation, [])


Redraft = Callable[[Drafted], list[list[int]]]  # what another drafter proposes in each round


def match_drafts(
    reference: Eagle3Drafter, variants: Iterable[Variant], drafted: Sequence[Drafted]
) -> list[DraftMatch]:
    """The share of equal drafts by situation, and the variant that is nearest to the engine's."""
    redrafts = {variant.key: (variant.what, _redrafts(variant.drafter)) for variant in variants}
    redrafts[STALE] = (STALE_WHAT, lambda one: stale_drafts(reference, one))
    whole = _redrafts(reference)
    matches = []
    for situation in (FIRST, LATER, CACHED):
        asked = [one for one in drafted if one.in_situation(situation)]
        if not asked:
            continue
        by_position = _agreement(asked, whole, situation)
        match = DraftMatch(
            situation=situation,
            num=sum(len(one.in_situation(situation)) for one in asked),
            by_position=by_position,
            agreement=_mean(by_position),
        )
        if match.agreement < 1.0:
            match = _with_nearest(match, redrafts, asked[:VARIANT_DOCUMENTS])
        matches.append(match)
    return matches


def _with_nearest(
    match: DraftMatch, redrafts: dict[str, tuple[str, Redraft]], asked: Sequence[Drafted]
) -> DraftMatch:
    """Tries every variant on a few documents."""
    shares = {
        key: _mean(_agreement(asked, redraft, match.situation)) for key, (_, redraft) in redrafts.items()
    }
    best = max(shares, key=lambda key: shares[key])
    return msgspec.structs.replace(
        match, best_variant=best, best_what=redrafts[best][0], best_agreement=shares[best]
    )


def stale_drafts(drafter: Eagle3Drafter, drafted: Drafted) -> list[list[int]]:
    """What comes of it when the keys of accepted drafts are not made anew from the target's states."""
    fused, known = drafter.fuse(_chosen(drafter, drafted)), torch.tensor(drafted.tokens[1:])
    cache = DraftCache()
    rounds = []
    with torch.no_grad():
        for proposal in drafted.proposals:
            index = proposal.num_tokens - 2
            cache.truncate(index)
            fresh = slice(cache.length, index + 1)
            output = drafter.advance(fused[fresh], known[fresh], cache)[-1:]
            drafts = []
            for number in range(len(proposal.drafts)):
                token = drafter.target_ids_R[drafter.logits(output).argmax(-1)]
                drafts.append(int(token))
                if number + 1 < len(proposal.drafts):
                    output = drafter.advance(drafter.feedback(output), token, cache)
            rounds.append(drafts)
    return rounds


def _redrafts(drafter: Eagle3Drafter) -> Redraft:
    def redraft(drafted: Drafted) -> list[list[int]]:
        propose = eagle_proposer(drafter, _chosen(drafter, drafted), drafted.tokens[1:])
        return [propose(p.num_tokens - 2, len(p.drafts)) for p in drafted.proposals]

    return redraft


def _chosen(drafter: Eagle3Drafter, drafted: Drafted) -> torch.Tensor:
    return drafted.states[:-1, list(drafter.config.state_layers)]


def _agreement(drafted: Sequence[Drafted], redraft: Redraft, situation: str) -> list[float]:
    """The share of equal drafts by position, of those whose earlier ones were equal."""
    reached: list[int] = []
    equal: list[int] = []
    for one in drafted:
        wanted = {id(proposal) for proposal in one.in_situation(situation)}
        for proposal, other in zip(one.proposals, redraft(one), strict=True):
            if id(proposal) in wanted:
                _count(proposal.drafts, other, reached, equal)
    return [e / r for e, r in zip(equal, reached, strict=True)]


def _count(drafts: Sequence[int], other: Sequence[int], reached: list[int], equal: list[int]) -> None:
    for position, (ours, theirs) in enumerate(zip(drafts, other, strict=True)):
        if position == len(reached):
            reached.append(0)
            equal.append(0)
        reached[position] += 1
        if ours != theirs:
            return
        equal[position] += 1


def _mean(by_position: Sequence[float]) -> float:
    """Equal drafts of all that were reached, each position with the same weight."""
    return sum(by_position) / max(len(by_position), 1)
