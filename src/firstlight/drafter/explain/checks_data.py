"""Checks of what the drafter was made from: the file, the target, the template, the mask, the stored states.

Each is a pure function of the evidence; None: nothing is wrong with it. Invariant: a check looks at numbers
alone and never at a file.
"""

from __future__ import annotations

from firstlight.drafter.explain.evidence import Evidence, LayerMatch, StatesMatch
from firstlight.drafter.explain.finding import Finding, Place, Side, Sure

MIN_COSINE = 0.98  # of a state with the reference's: layouts that round stay far above
MIN_TEACHER = 0.9  # of the target's own choices, from the last state
MIN_SUPERVISED = 0.001
REPEATED = 0.2  # of the answers


def loads(evidence: Evidence) -> Finding | None:
    """The strict reader takes the checkpoint."""
    loaded = evidence.loaded
    if not loaded.error:
        return None
    return Finding(
        cause="the checkpoint does not load",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CHECKPOINT,
        said=f"The checkpoint and the target do not fit: {loaded.error}",
        evidence=[loaded.error],
        next_step=loaded.remedy or "Export the drafter again, or download its files again.",
    )


def same_target(evidence: Evidence) -> Finding | None:
    """The target is the one that the data were made with."""
    changed = [] if evidence.data is None else evidence.data.changed
    if not changed:
        return None
    only_template = changed == ["chat template"]
    what = " and ".join(changed)
    return Finding(
        cause="another chat template" if only_template else "another target",
        side=Side.TEMPLATE if only_template else Side.DATA,
        sure=Sure.PROVED,
        place=Place.TEMPLATE if only_template else Place.TARGET,
        said=f"The target is not the one that the data were made with: {what} differ.",
        evidence=[f"the SHA-256 of the target's {name} is not the one in the manifest" for name in changed],
        next_step="Serve the model that the data were made with, or make data and drafter anew for this one.",
    )


def same_template(evidence: Evidence) -> Finding | None:
    """The template renders the prompts to the tokens that the data have."""
    data = evidence.data
    if data is None or not data.num_rendered_otherwise:
        return None
    return Finding(
        cause="the prompts are rendered otherwise",
        side=Side.TEMPLATE,
        sure=Sure.PROVED,
        place=Place.TEMPLATE,
        said="The chat template makes other tokens of the prompts than the data have: the drafter was "
        "trained on "
        "another form of conversation than is served (another template, thinking on or off, a system "
        "prompt).",
        evidence=[
            f"{data.num_rendered_otherwise} of {data.num_rendered} recorded prompts render otherwise",
            data.first_difference,
        ],
        next_step="Give the server the template of the data (--chat-template), or generate, capture and "
        "train again with the served one.",
    )


def mask_is_full(evidence: Evidence) -> Finding | None:
    """Something is supervised."""
    data = evidence.data
    if data is None or data.supervised_share is None:
        return None
    is_empty = data.supervised_share < MIN_SUPERVISED
    if not is_empty and not data.num_without_supervision:
        return None
    return Finding(
        cause="the loss mask is empty" if is_empty else "some loss masks are empty",
        side=Side.DATA,
        sure=Sure.PROVED if is_empty else Sure.LIKELY,
        place=Place.DATA,
        said="Documents have no supervised token, so nothing is learned from them; most often the turns of "
        "the answer were not found in the rendered text.",
        evidence=[
            f"{100 * data.supervised_share:.2f} % of the indices are supervised",
            f"{data.num_without_supervision} of {data.num_documents} documents have none",
        ],
        next_step="Check how the mask finds the assistant's turns in this template, then capture again "
        "(firstlight drafter capture keeps the boundary by token ids).",
    )


def mask_is_aligned(evidence: Evidence) -> Finding | None:
    """The mask begins where the first draft of an answer is asked for."""
    data = evidence.data
    if data is None or not data.mask_shifts:
        return None
    shift, num = max(data.mask_shifts.items(), key=lambda item: item[1])
    total = sum(data.mask_shifts.values())
    if shift == 0 and num == total:
        return None
    shift, num = max(((s, n) for s, n in data.mask_shifts.items() if s), key=lambda item: item[1])
    late = (
        "late: the first drafts of an answer are never trained"
        if shift > 0
        else "early: drafts inside of the prompt are trained"
    )
    return Finding(
        cause="the loss mask is shifted",
        side=Side.DATA,
        sure=Sure.PROVED if 2 * num > total else Sure.LIKELY,
        place=Place.DATA,
        said=f"The loss mask is not aligned with the predicted token; it begins {abs(shift)} "
        f"{'index' if abs(shift) == 1 else 'indices'} {late}.",
        evidence=[f"{num} of {total} documents", *_offsets(evidence)],
        next_step="Align the mask by the predicted token (train index j where x_{j+1} and x_{j+2} are the "
        "answer's), capture again and train again.",
    )


def same_tokens(evidence: Evidence) -> Finding | None:
    """The stored tokens are those that the engine made."""
    data = evidence.data
    if data is None or not data.num_other_tokens:
        return None
    return Finding(
        cause="the stored tokens are others",
        side=Side.DATA,
        sure=Sure.PROVED,
        place=Place.DATA,
        said="Stored tokens are not those of the answers: text was tokenised again, or files were mixed.",
        evidence=[f"{data.num_other_tokens} of {data.num_documents} documents"],
        next_step="Capture again from the answers' token ids.",
    )


def repeats_little(evidence: Evidence) -> Finding | None:
    """The answers are not mostly loops."""
    data = evidence.data
    if data is None or data.repeated_share <= REPEATED:
        return None
    return Finding(
        cause="many answers repeat themselves",
        side=Side.DATA,
        sure=Sure.HINT,
        place=Place.DATA,
        said="Many answers end in a loop, which is easy to draft: acceptance is flattered, and little is "
        "learned.",
        evidence=[f"{100 * data.repeated_share:.0f} % of the answers repeat a run of tokens three times"],
        next_step="Cut the loops, as firstlight drafter generate does.",
    )


def stored_states(evidence: Evidence) -> Finding | None:
    """The stored states are those of their layers and rows."""
    match = find_states(evidence, "stored")
    if match is None:
        return None
    if match.row_offset and worst(match).cosine < MIN_COSINE:
        late = "later" if match.row_offset < 0 else "earlier"
        return Finding(
            cause="the stored states are of other rows",
            side=Side.DATA,
            sure=Sure.PROVED,
            place=Place.DATA,
            said=f"The stored states belong to the token one {late} than the one they stand at"
            + (": each draft is shown the state of what it is to predict." if match.row_offset < 0 else "."),
            evidence=[
                f"cosine {worst(match).cosine:.3f} in place, {match.row_offset_cosine:.4f} one row {late}"
            ],
            next_step="Capture again; index j must hold the state of x_j.",
        )
    found = wrong_layer(match)
    if found is None:
        return None
    is_last = found.layer == match.layers[-1].layer
    return Finding(
        cause="the last state is of another block" if is_last else "the stored states are of other layers",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CAPTURE,
        said=f"The capture that made the data takes another state than it says{_teacher_words(is_last)}",
        evidence=[said_of(found), *_teachers(evidence, "stored")],
        next_step="Mend the capture (state k is the residual stream after k blocks, before any norm; the "
        "last one "
        "is taken behind the last block), capture again and train again.",
    )


def last_state_is_the_teacher(evidence: Evidence) -> Finding | None:
    """The last state gives the tokens that the target chose."""
    found = next((teacher for teacher in evidence.teachers if teacher.agreement < MIN_TEACHER), None)
    if found is None or stored_states(evidence) is not None:
        return None
    return Finding(
        cause="the last state is no teacher",
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CAPTURE,
        said="The target's norm and head on the last captured state do not give what the target chose: the "
        "state is of another block, it was normed, or the answers are not greedy. A drafter learns from a "
        "weak teacher.",
        evidence=[line for stage in ("stored", "decode") for line in _teachers(evidence, stage)],
        next_step="Check that the last state is taken behind the last block and before the final norm, and "
        "that answers were made at temperature 0; then capture again.",
    )


def find_states(evidence: Evidence, stage: str) -> StatesMatch | None:
    """The comparison of one stage."""
    return next((match for match in evidence.states if match.stage == stage), None)


def worst(match: StatesMatch) -> LayerMatch:
    """The state that fits the reference least."""
    return min(match.layers, key=lambda layer: layer.cosine)


def wrong_layer(match: StatesMatch) -> LayerMatch | None:
    """The state that fits another layer of the reference, and not its own; the worst one otherwise."""
    bad = [layer for layer in match.layers if layer.cosine < MIN_COSINE]
    other = [layer for layer in bad if layer.best_layer != layer.layer and layer.best_cosine >= MIN_COSINE]
    return (other or bad or [None])[0]  # type: ignore[list-item]


def said_of(layer: LayerMatch) -> str:
    """One state in words."""
    return (
        f"state {layer.layer}: cosine {layer.cosine:.4f} and relative distance {layer.relative_l2:.3f} from "
        f"the reference; state {layer.best_layer} fits it with {layer.best_cosine:.4f}"
    )


def _teacher_words(is_last: bool) -> str:
    return ", so that the drafter learned from a weaker teacher." if is_last else "."


def _teachers(evidence: Evidence, stage: str) -> list[str]:
    return [
        f"norm and head on the last state give {100 * t.agreement:.1f} % of {t.num} tokens ({stage})"
        for t in evidence.teachers
        if t.stage == stage
    ]


def _offsets(evidence: Evidence) -> list[str]:
    accuracy = evidence.accuracy
    if accuracy is None or len(accuracy.by_offset) < 2:
        return []
    shown = ", ".join(f"{100 * bucket.accuracy:.0f} % ({bucket.num})" for bucket in accuracy.by_offset)
    return [f"first drafts right by distance from the answer's start: {shown}"]


CHECKS = (
    loads,
    same_target,
    same_template,
    mask_is_full,
    mask_is_aligned,
    same_tokens,
    repeats_little,
    stored_states,
    last_state_is_the_teacher,
)
