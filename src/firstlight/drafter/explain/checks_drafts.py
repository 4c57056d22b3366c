"""Checks of what the engine drafts and accepts: behind a prompt, after a verification, and behind a cached
prefix.

Each is a pure function of the evidence; None: nothing is wrong with it. Invariant: a fault is called by its
name only if the reference with that very fault gives the engine's drafts.
"""

from __future__ import annotations

from firstlight.drafter.explain import variants
from firstlight.drafter.explain.draft_keys import CACHED as CACHED_KEYS
from firstlight.drafter.explain.draft_keys import PROMPT, VERIFIED
from firstlight.drafter.explain.drafts import CACHED, FIRST, LATER, STALE
from firstlight.drafter.explain.evidence import DraftMatch, Evidence, OwnLoop
from firstlight.drafter.explain.finding import Finding, Place, Side, Sure

SAME_DRAFTS = 0.95
MANY_TIES = 0.85
MAX_TIE_COST = 0.02  # of the acceptance length
MANY_ROUNDS = 20
LESS = 0.05  # of drafts that are equal, to be called fewer
REPRODUCED = 0.95
MAX_KEY_GAP = 0.02  # of draft keys in the pages: those in 16 bits stay far below
WRONG_KEYS = 0.3
NO_PREFIX_KEYS = "draft keys of cached prefixes are missing"

_NAMED = {
    variants.NO_FC: "fc is left out (the drafter runs as EAGLE, not as EAGLE-3)",
    variants.NO_RESIDUAL: "the residual around the drafter's attention is lost",
    variants.NO_NORM: "the drafter's last norm is left out",
    variants.HEAD: "the drafter's head was overwritten by the target's",
    variants.EMBEDDING: "the drafter's embedding was overwritten by the target's",
    variants.RESIDUAL: "norm_before_residual is taken the wrong way",
    variants.FEEDBACK: "the state handed to the next draft is normed where it must not be, or not where it "
    "must",
    variants.NORM_BEFORE_FC: "norm_before_fc is taken the wrong way",
    variants.IDS_LOWER: "layer ids are taken one too low",
    variants.IDS_HIGHER: "layer ids are taken one too high",
    variants.ROPE: "the rotary scaling is not the checkpoint's",
    STALE: "draft keys are not made anew from the target's states after verification",
}


def first_drafts(evidence: Evidence) -> Finding | None:
    """Drafts behind a prompt are those of the reference."""
    match = _situation(evidence, FIRST)
    if match is None or _is_same(evidence, match):
        return None
    return _drafts(
        evidence,
        match,
        "the engine drafts otherwise than the reference",
        "Already behind a prompt the engine drafts other tokens than the reference from the same checkpoint",
    )


def later_drafts(evidence: Evidence) -> Finding | None:
    """Drafts after a verification are those of the reference."""
    match, before = _situation(evidence, LATER), _situation(evidence, FIRST)
    if match is None or _is_same(evidence, match) or _is_low(before):
        return None
    if before is not None and match.agreement > before.agreement - LESS and match.best_variant != STALE:
        return None
    return _drafts(
        evidence,
        match,
        "draft state after a verification is wrong",
        "Behind a prompt the engine drafts as the reference does, after a verification it does not: keys of "
        "accepted drafts, or the row of the state after a rejection",
    )


def draft_keys_are_right(evidence: Evidence) -> Finding | None:
    """Draft keys in the pages are those of the target's states."""
    found = {match.origin: match for match in evidence.draft_keys}
    prompt = found.get(PROMPT)
    if prompt is None or prompt.relative_l2 > WRONG_KEYS:
        return None  # what is wrong from the start is said by its drafts
    least = max(MAX_KEY_GAP, 1.5 * prompt.relative_l2)
    causes = {VERIFIED: _NAMED[STALE], CACHED_KEYS: NO_PREFIX_KEYS}
    for origin, cause in causes.items():
        match = found.get(origin)
        if match is None or match.relative_l2 <= least:
            continue
        what = "accepted drafts" if origin == VERIFIED else "cached prefixes"
        return Finding(
            cause=cause,
            side=Side.INTEGRATION,
            sure=Sure.PROVED,
            place=Place.DRAFTS,
            said=f"In the engine's pages the draft keys of {what} are not those of the target's states; "
            "those of "
            "prompts are.",
            evidence=[
                f"{one.origin}: {one.num} keys, relative distance {one.relative_l2:.3f} from the reference"
                for one in evidence.draft_keys
            ],
            next_step="Write the keys of accepted tokens anew from the target's states in every step, also "
            "while no "
            "draft is made, and before a page may be hit.",
        )
    return None


def cached_drafts(evidence: Evidence) -> Finding | None:
    """Drafts behind a cached prefix are those of the reference."""
    match = _situation(evidence, CACHED)
    others = [m for m in (_situation(evidence, FIRST), _situation(evidence, LATER)) if m is not None]
    if match is None or match.agreement >= SAME_DRAFTS or any(_is_low(other) for other in others):
        return None
    if others and match.agreement > min(other.agreement for other in others) - LESS:
        return None
    return Finding(
        cause=NO_PREFIX_KEYS,
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.DRAFTS,
        said="Behind a prefix that came from the cache the engine drafts other tokens than the reference, "
        "without one it does not: pages are reused whose draft keys were never written.",
        evidence=[_said_of_drafts(m) for m in (*others, match)],
        next_step="Write a page's draft keys before it may be hit, or recompute the prefix for the drafter; "
        "--no-prefix-cache shows the difference.",
    )


def engine_as_its_own_loop(evidence: Evidence) -> Finding | None:
    """The engine accepts what the own loop accepts on the same text."""
    engine, loop = evidence.engine, evidence.engine_loop
    if engine is None or loop is None:
        return None
    if reaches(engine.acceptance_length, loop):
        return None
    return Finding(
        cause="the engine accepts less than it could",
        side=Side.INTEGRATION,
        sure=Sure.LIKELY,
        place=Place.SERVED,
        said="On the very text that the engine made, the reference's drafts would have been accepted more "
        "often.",
        evidence=[
            f"{engine.acceptance_length:.2f} in {engine.source}, {loop.acceptance_length:.2f} "
            f"({loop.low:.2f} to {loop.high:.2f}) in the own loop, k = {loop.k}"
        ],
        next_step="Look at what the other findings say of the engine's states and drafts.",
    )


def served_as_predicted(evidence: Evidence) -> Finding | None:
    """A served engine reaches what the reference predicts."""
    served, loop, accuracy = evidence.served, evidence.own_loop, evidence.accuracy
    if served is None or loop is None or accuracy is None:
        return None
    if reaches(served.acceptance_length, loop):
        return None
    exact = served.acceptance_length < 1.005
    signature = (
        "exactly 1.00 is fc left out, weights that were not loaded, the wrong algorithm, or a wrong d2t"
        if exact
        else "the server that was measured loses it on the way" + _not_here(evidence)
    )
    return Finding(
        cause="the served engine loses drafts",
        side=Side.INTEGRATION,
        sure=Sure.LIKELY,
        place=Place.SERVED,
        said=f"The server accepts far less than this drafter is worth on the same target: {signature}.",
        evidence=[
            f"served {served.acceptance_length:.2f} ({served.source}), own loop {loop.acceptance_length:.2f} "
            f"({loop.low:.2f} to {loop.high:.2f}), predicted {accuracy.predicted_length:.2f}, all at k = "
            f"{loop.k}"
        ],
        next_step="Run firstlight drafter probe on the folder that is served, then try the server with one "
        "rank, without its prefix cache, and with the algorithm named explicitly.",
    )


def drafts_as_the_reference(evidence: Evidence, situation: str) -> bool:
    """Whether the drafts of a situation were measured, and are the reference's."""
    match = _situation(evidence, situation)
    return match is not None and _is_same(evidence, match)


def _not_here(evidence: Evidence) -> str:
    """Said only where the engine of this process was measured, and loses nothing."""
    engine, loop = evidence.engine, evidence.engine_loop
    is_whole = engine is not None and loop is not None and reaches(engine.acceptance_length, loop)
    return "; the engine in this process does not" if is_whole else ""


def _situation(evidence: Evidence, situation: str) -> DraftMatch | None:
    return next((match for match in evidence.drafts if match.situation == situation), None)


def _is_same(evidence: Evidence, match: DraftMatch) -> bool:
    """Near ties fall to either side: more of them in a drafter that knows little, or in a single round.

    They cost nothing: on the text of the engine it accepts what the own loop does. What a known fault gives
    in many rounds is no tie, whatever it costs on a few answers.
    """
    if match.agreement >= SAME_DRAFTS:
        return True
    if match.num >= MANY_ROUNDS and _is_reproduced(match):
        return False
    engine, loop = evidence.engine, evidence.engine_loop
    is_little = match.agreement >= MANY_TIES or round((1.0 - match.agreement) * match.num) <= 1
    if engine is None or loop is None or not is_little:
        return False
    return abs(engine.acceptance_length / loop.acceptance_length - 1.0) <= MAX_TIE_COST


def _is_reproduced(match: DraftMatch) -> bool:
    """A variant of the reference gives the engine's drafts, and the reference does not."""
    return match.best_agreement >= REPRODUCED and match.best_agreement > match.agreement + LESS


def _is_low(match: DraftMatch | None) -> bool:
    return match is not None and match.agreement < SAME_DRAFTS


def _drafts(evidence: Evidence, match: DraftMatch, cause: str, said: str) -> Finding:
    """The variant that reproduces the engine's drafts names the fault; without one it stays unnamed."""
    if _is_reproduced(match):
        cause = _NAMED.get(match.best_variant, match.best_what)
        said += f"; the reference with {match.best_what} gives the engine's drafts"
    shown = [_said_of_drafts(m) for m in evidence.drafts]
    return Finding(
        cause=cause,
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.DRAFTS,
        said=said + ".",
        evidence=shown,
        next_step="Mend this in the engine's drafter; firstlight drafter probe gives states and expected "
        "drafts to test it with.",
    )


def _said_of_drafts(match: DraftMatch) -> str:
    positions = " ".join(f"{100 * value:.0f}" for value in match.by_position)
    text = f"{match.situation} rounds ({match.num}): {positions} % of the drafts are the reference's"
    if match.best_variant and match.agreement < SAME_DRAFTS:
        text += f"; with {match.best_what} {100 * match.best_agreement:.0f} %"
    return text


def reaches(acceptance_length: float, loop: OwnLoop) -> bool:
    """Within 5 % of the own loop, or in its interval."""
    return acceptance_length >= min(0.95 * loop.acceptance_length, loop.low)


CHECKS = (
    first_drafts,
    draft_keys_are_right,
    later_drafts,
    cached_drafts,
    engine_as_its_own_loop,
    served_as_predicted,
)
