"""Which checks had anything to look at: what was not measured is not said to be in order.

Invariant: every check has its entry; without evidence its promise is not told.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.drafter.explain import checks_data, checks_drafter, checks_drafts, checks_engine
from firstlight.drafter.explain.draft_keys import PROMPT
from firstlight.drafter.explain.drafts import CACHED, FIRST, LATER
from firstlight.drafter.explain.evidence import Evidence
from firstlight.drafter.explain.finding import Finding

Check = Callable[[Evidence], Finding | None]


def _states(stage: str) -> Callable[[Evidence], bool]:
    def is_right(evidence: Evidence) -> bool:
        match = checks_data.find_states(evidence, stage)
        return match is not None and checks_data.wrong_layer(match) is None

    return is_right


def _drafts(situation: str) -> Callable[[Evidence], bool]:
    return lambda evidence: checks_drafts.drafts_as_the_reference(evidence, situation)


def _has_data(evidence: Evidence) -> bool:
    return evidence.data is not None and evidence.data.num_documents > 0


def _has_mask(evidence: Evidence) -> bool:
    return evidence.data is not None and evidence.data.supervised_share is not None


def _is_loaded(evidence: Evidence) -> bool:
    return not evidence.loaded.error


def _has_accuracy(evidence: Evidence) -> bool:
    accuracy = evidence.accuracy
    return accuracy is not None and accuracy.num_tokens >= checks_drafter.MIN_TOKENS


def _has_keys(evidence: Evidence) -> bool:
    """Those of verified or cached tokens, beside right ones of a prompt."""
    found = {match.origin: match for match in evidence.draft_keys}
    prompt = found.get(PROMPT)
    return prompt is not None and prompt.relative_l2 <= checks_drafts.WRONG_KEYS and len(found) > 1


def promise(check: Check, evidence: Evidence) -> str:
    """What a check that found nothing may say: no more than was looked at."""
    words = (check.__doc__ or check.__name__).splitlines()[0]
    if check is checks_drafter.keeps_with_length and evidence.accuracy is not None:
        return f"{words.rstrip('.')}: up to {evidence.accuracy.longest} tokens."
    return words


MEASURED: dict[Check, Callable[[Evidence], bool]] = {
    checks_data.loads: _is_loaded,
    checks_data.same_target: _has_data,
    checks_data.same_template: lambda evidence: evidence.data is not None and evidence.data.num_rendered > 0,
    checks_data.mask_is_full: _has_mask,
    checks_data.mask_is_aligned: lambda evidence: bool(evidence.data and evidence.data.mask_shifts),
    checks_data.same_tokens: _has_mask,
    checks_data.repeats_little: _has_data,
    checks_data.stored_states: _states("stored"),
    checks_data.last_state_is_the_teacher: lambda evidence: (
        bool(evidence.teachers) and min(t.agreement for t in evidence.teachers) >= checks_data.MIN_TEACHER
    ),
    checks_engine.plain_decode: lambda evidence: evidence.greedy_agreement is not None,
    checks_engine.prefill_states: _states("prefill"),
    checks_engine.decode_states: _states("decode"),
    checks_engine.verify_states: _states("verify"),
    checks_engine.ranks_agree: lambda e: any(match.ranks_gap is not None for match in e.states),
    checks_engine.weights_are_the_file_s: lambda evidence: evidence.weights is not None,
    checks_drafts.first_drafts: _drafts(FIRST),
    checks_drafts.later_drafts: _drafts(LATER),
    checks_drafts.cached_drafts: _drafts(CACHED),
    checks_drafts.draft_keys_are_right: _has_keys,
    checks_drafts.engine_as_its_own_loop: lambda e: e.engine is not None and e.engine_loop is not None,
    checks_drafts.served_as_predicted: lambda e: e.served is not None and e.own_loop is not None,
    checks_drafter.configured: _has_accuracy,
    checks_drafter.rope_is_the_target_s: lambda e: _is_loaded(e) and e.loaded.rope == e.loaded.target_rope,
    checks_drafter.keeps_with_length: lambda evidence: len(checks_drafter.lengths_of(evidence)) > 1,
    checks_drafter.sees_no_future: lambda evidence: evidence.leak is not None,
    checks_drafter.says_what_the_target_says: _has_accuracy,
    checks_drafter.learned: _has_accuracy,
}
