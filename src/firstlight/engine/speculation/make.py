"""The drafting that the settings ask for. Called by `engine.startup` on rank 0.

Invariant: what cannot be had is an error at the start, never a server that silently does not draft.
"""

from __future__ import annotations

from firstlight.base.config import EngineSection
from firstlight.base.draft_profile import parse_profile
from firstlight.base.errors import UsageError
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.engine.speculation.policy import Policy
from firstlight.engine.speculation.rejection_rule import RejectionRule
from firstlight.engine.speculation.rule import Rule
from firstlight.engine.speculation.speculation import Speculation
from firstlight.engine.speculation.synthetic import Synthetic

NGRAM = "ngram"


def make_speculation(section: EngineSection) -> Speculation | None:
    """None where no drafter was asked for. Raises a `UsageError` for one that does not exist."""
    if section.drafter is None:
        return None
    if section.drafter != NGRAM:
        raise UsageError(f"--drafter {section.drafter} is no drafter.", "Use ngram.")
    policy = Policy(section.draft_tokens, adapts=section.draft_adapt)
    return Speculation(NgramDrafter(), policy, _rule(section))


def _rule(section: EngineSection) -> Rule | None:
    if section.draft_acceptance is not None:
        return Synthetic(parse_profile(section.draft_acceptance))
    return RejectionRule() if section.draft_verification == "rejection" else None
