"""Checks of the engine: its states by stage and by rank, its plain decode, the weights that it holds.

Each is a pure function of the evidence; None: nothing is wrong with it. Invariant: what a finding names was
reproduced or measured; what only looks wrong says so.
"""

from __future__ import annotations

from firstlight.drafter.explain.checks_data import (
    MIN_COSINE,
    MIN_TEACHER,
    find_states,
    said_of,
    worst,
    wrong_layer,
)
from firstlight.drafter.explain.evidence import Evidence
from firstlight.drafter.explain.finding import Finding, Place, Side, Sure

MIN_GREEDY = 0.9  # of the reference's choices, from the engine's plain decode
MAX_RANKS_GAP = 0.02


def plain_decode(evidence: Evidence) -> Finding | None:
    """Without drafts the engine chooses what the reference chooses."""
    share = evidence.greedy_agreement
    if share is None or share >= MIN_GREEDY:
        return None
    return Finding(
        cause="the target itself is served wrongly",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CAPTURE,
        said="Without any drafter the engine chooses other tokens than the reference: no drafter can be "
        "right.",
        evidence=[f"{100 * share:.1f} % of the tokens are those of the reference"],
        next_step="Mend the target first: firstlight run with --cpu-kernels stock, then --dtype float32, and "
        "compare the answers.",
    )


def prefill_states(evidence: Evidence) -> Finding | None:
    """States in one pass over a prompt are those of the reference."""
    return _states(evidence, "prefill", Place.CAPTURE, "already in prefill")


def decode_states(evidence: Evidence) -> Finding | None:
    """States of tokens made one by one are those of the reference."""
    if prefill_states(evidence) is not None:
        return None
    return _states(evidence, "decode", Place.DECODE, "in decode, while prefill is right")


def verify_states(evidence: Evidence) -> Finding | None:
    """States of steps that verify drafts are those of the reference."""
    if prefill_states(evidence) is not None or decode_states(evidence) is not None:
        return None
    return _states(evidence, "verify", Place.DECODE, "when drafts are verified, while plain steps are right")


def ranks_agree(evidence: Evidence) -> Finding | None:
    """Every rank holds the same states."""
    match = next((match for match in evidence.states if match.ranks_gap is not None), None)
    if match is None or match.ranks_gap is None or match.ranks_gap <= MAX_RANKS_GAP:
        return None
    found = worst(match)
    return Finding(
        cause="per-rank partial sums are captured",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CAPTURE,
        said="The ranks of the target capture different states: each takes its own part of a sum that is not "
        "made yet, so acceptance falls with the number of ranks only.",
        evidence=[
            f"{match.stage}: the ranks' states differ from their mean by {100 * match.ranks_gap:.1f} %",
            f"{said_of(found)}; the mean of the ranks has {match.ranks_mean_cosine or 0.0:.4f} on average",
        ],
        next_step="Capture behind the reduction over the ranks (a fused all-reduce postpones it), or serve "
        "with one rank.",
    )


def weights_are_the_file_s(evidence: Evidence) -> Finding | None:
    """The engine holds what the file has."""
    if not evidence.weights:
        return None
    names = [match.name for match in evidence.weights]
    taken = [match.name for match in evidence.weights if match.is_the_target_s]
    return Finding(
        cause=f"{(taken or names)[0]} was overwritten after loading",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.WEIGHTS,
        said="The engine's drafter does not hold the weights of the file"
        + (f": {', '.join(taken)} are the target's." if taken else "."),
        evidence=[
            f"{match.name}: differs by {100 * match.relative_difference:.0f} % of its norm"
            + (", and equals the target's" if match.is_the_target_s else "")
            for match in evidence.weights
        ],
        next_step="Share embedding and head with the target only where the checkpoint has none of its own.",
    )


def _states(evidence: Evidence, stage: str, place: Place, when: str) -> Finding | None:
    match = find_states(evidence, stage)
    found = None if match is None else wrong_layer(match)
    if match is None or found is None:
        return None
    is_last = found.layer == match.layers[-1].layer and stage != "verify"
    is_other = found.best_layer != found.layer and found.best_cosine >= MIN_COSINE
    what = "computes states wrongly"
    if match.row_offset and match.row_offset_cosine >= MIN_COSINE:
        what = f"hands out states of other rows, {abs(match.row_offset)} off"
    elif is_other:
        what = f"captures state {found.best_layer} as state {found.layer}"
    cause = "the last state is of another block" if is_last and is_other else f"the engine {what}"
    agreement = next((t.agreement for t in evidence.teachers if t.stage == stage), None)
    teacher = (
        [f"norm and head on the last state give {100 * agreement:.1f} % of what was chosen"]
        if agreement is not None and agreement < MIN_TEACHER
        else []
    )
    return Finding(
        cause=cause,
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=place,
        said=f"The engine {what}, {when}.",
        evidence=[f"{stage}, {match.num_tokens} tokens: {said_of(found)}", *teacher],
        next_step="Mend the capture in the engine: state k is the residual stream after k blocks, before "
        "any norm.",
    )


CHECKS = (
    plain_decode,
    prefill_states,
    decode_states,
    verify_states,
    ranks_agree,
    weights_are_the_file_s,
)
