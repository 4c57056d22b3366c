"""Checks of the drafter itself: what its configuration says, what it learned, and how that was counted.

Each is a pure function of the evidence; None: nothing is wrong with it. Invariant: accuracy is over all
tokens of the target, on states of the reference, so that no engine can spoil it.
"""

from __future__ import annotations

from firstlight.drafter.explain import variants
from firstlight.drafter.explain.checks_drafts import reaches
from firstlight.drafter.explain.evidence import Accuracy, Bucket, Evidence, Trained, VariantAccuracy
from firstlight.drafter.explain.finding import Finding, Place, Side, Sure

MIN_FIRST = 0.3  # of the first drafts: below, a drafter cannot pay for itself
BETTER = 0.05  # of the first drafts, and of the predicted length, to be called better
MUCH_BETTER = 0.5
LEAST_LONGER = 0.15  # tokens of a step: of a drafter that knows little, 5 % are noise
MIN_TOKENS = 50
MIN_COVERAGE = 0.9
LEAK = 1e-3
FALLS = 0.6  # of the accuracy of short documents
_IN_CONFIG = (
    variants.IDS_LOWER,
    variants.IDS_HIGHER,
    variants.RESIDUAL,
    variants.FEEDBACK,
    variants.NORM_BEFORE_FC,
    variants.ROPE,
    variants.EMBEDDING,
    variants.HEAD,
)
_STEPS = {
    variants.IDS_LOWER: "Correct the layer ids: at the top level of config.json they count blocks that have "
    "run; in eagle_config they name the block whose output is taken.",
    variants.IDS_HIGHER: "Correct the layer ids: files of SGLang and SpecForge name the block whose output "
    "is taken, and need 1 more where blocks that have run are counted.",
    variants.ROPE: "Write the rope_scaling that the drafter was trained with into its config.json.",
    variants.EMBEDDING: "Leave embed_tokens out of the file, or export the one that training used.",
    variants.HEAD: "Export lm_head again: the file's is not the one that was trained.",
}


def configured(evidence: Evidence) -> Finding | None:
    """No other reading of the configuration makes the drafter better."""
    accuracy, best = evidence.accuracy, best_variant(evidence)
    if accuracy is None or best is None:
        return None
    config = {
        variants.IDS_LOWER: "the layer ids are one too high",
        variants.IDS_HIGHER: "the layer ids are one too low",
        variants.ROPE: "the rotary scaling was dropped or is another",
    }
    cause = config.get(best.key, f"{best.key.replace('-', '_')} is configured the wrong way")
    return Finding(
        cause=cause,
        side=Side.INTEGRATION,
        sure=Sure.PROVED,
        place=Place.CONFIG,
        said=f"With {best.what} the same weights are right far more often: config.json does not say how the "
        "drafter was trained.",
        evidence=[
            f"as configured: {_said(accuracy)}",
            f"with {best.what}: {_said(best.found)}",
            *_rope(evidence, best),
            *evidence.loaded.notes[:2],
        ],
        next_step=_STEPS.get(best.key, f"Set the flag in config.json so that it means: {best.what}."),
    )


def rope_is_the_target_s(evidence: Evidence) -> Finding | None:
    """The drafter turns positions as the target does."""
    loaded, best = evidence.loaded, best_variant(evidence)
    if loaded.rope == loaded.target_rope or (best is not None and best.key == variants.ROPE):
        return None
    return Finding(
        cause="the rotary tables differ",
        side=Side.INTEGRATION,
        sure=Sure.HINT,
        place=Place.CONFIG,
        said="The drafter's rotary table is not the target's; that is right only if it was trained so.",
        evidence=[f"drafter: {loaded.rope}", f"target: {loaded.target_rope}"],
        next_step="Compare with the settings of the training; a dropped rope_scaling shows at long texts "
        "first.",
    )


def keeps_with_length(evidence: Evidence) -> Finding | None:
    """Accuracy does not fall with the length of the text, as far as it was looked at."""
    buckets = lengths_of(evidence)
    if len(buckets) < 2 or buckets[-1].accuracy >= FALLS * buckets[0].accuracy:
        return None
    return Finding(
        cause="accuracy falls with length",
        side=Side.TRAINING,
        sure=Sure.HINT,
        place=Place.TRAINING,
        said="The drafter is right less often in long texts; most often it was trained on shorter ones, or "
        "its rotary scaling is another.",
        evidence=[f"up to index {b.end}: {100 * b.accuracy:.0f} % of {b.num} first drafts" for b in buckets],
        next_step="Train on documents as long as those that are served; compare the rotary tables.",
    )


def sees_no_future(evidence: Evidence) -> Finding | None:
    """A draft does not depend on what stands after it."""
    if evidence.leak is None or evidence.leak <= LEAK:
        return None
    trained, accuracy = evidence.trained, evidence.accuracy
    shown = [
        f"replacing all that stands after it changes a draft's logits by {evidence.leak:.2f} of their spread"
    ]
    if trained is not None and trained.accuracy and accuracy is not None:
        shown.append(
            f"training said {100 * trained.accuracy[0]:.0f} % of first drafts right, without the leak it is "
            f"{100 * accuracy.accuracy[0]:.0f} %"
        )
    return Finding(
        cause="training sees the future",
        side=Side.TRAINING,
        sure=Sure.PROVED,
        place=Place.TRAINING,
        said="In training a draft may attend to what it is asked to predict, so its loss is too low for "
        "what is learned.",
        evidence=shown,
        next_step="Mend the attention mask or the shift of the labels in training, and train again.",
    )


def says_what_the_target_says(evidence: Evidence) -> Finding | None:
    """The draft vocabulary has the tokens that are wanted."""
    accuracy = evidence.accuracy
    if accuracy is None or accuracy.num_tokens < MIN_TOKENS or accuracy.coverage >= MIN_COVERAGE:
        return None
    trained = evidence.trained
    return Finding(
        cause="the draft vocabulary lacks tokens",
        side=Side.TRAINING,
        sure=Sure.PROVED,
        place=Place.TRAINING,
        said="The draft vocabulary lacks many of the tokens that the target says"
        + (
            "; what training said fits an accuracy among its own tokens only."
            if _counts_own_tokens(evidence, accuracy)
            else "."
        ),
        evidence=[
            f"it has {100 * accuracy.coverage:.1f} % of {accuracy.num_tokens} wanted tokens",
            f"first drafts right: {100 * accuracy.in_vocabulary:.1f} % of those, "
            f"{100 * accuracy.accuracy[0]:.1f} % of all",
            *_training_said(trained),
        ],
        next_step="Build the draft vocabulary from answers of this target, make it larger, and count "
        "accuracy over the whole vocabulary.",
    )


def learned(evidence: Evidence) -> Finding | None:
    """The drafter, read in the best way, is right often enough."""
    best = best_variant(evidence)
    accuracy = evidence.accuracy if best is None else best.found
    if accuracy is None or accuracy.num_tokens < MIN_TOKENS or accuracy.accuracy[0] >= MIN_FIRST:
        return None
    trained = evidence.trained
    if trained is not None and trained.accuracy and trained.accuracy[0] >= MIN_FIRST:
        return _not_as_trained(evidence, accuracy, trained)
    return Finding(
        cause="too little was learned",
        side=Side.TRAINING,
        sure=Sure.LIKELY,
        place=Place.TRAINING,
        said="On the reference's own states, without any engine, the drafter is right too rarely to pay for "
        "itself: too little training, too little data, or data of another kind.",
        evidence=[_said(accuracy), *_training_said(trained), *_served_as_expected(evidence)],
        next_step="Look at the curves in train/curves.png: if accuracy still rises, train on; if it stands, "
        "generate more answers of the kind that is served."
        if trained is not None
        else "Ask its maker for target, data and accuracy on held-out answers, or give the run folder with "
        "--out: what its training was is not known here.",
    )


def _not_as_trained(evidence: Evidence, accuracy: Accuracy, trained: Trained) -> Finding:
    """Training was right often enough, so that more of it is not what is missing."""
    return Finding(
        cause="the drafter is not as good as its training said",
        side=Side.TRAINING,
        sure=Sure.LIKELY,
        place=Place.TRAINING,
        said="On the reference's own states, without any engine, the drafter is right too rarely to pay for "
        "itself, and its training said otherwise: "
        + (
            "these weights, this target or this data are not what was measured there."
            if trained.is_held_out
            else "training was measured on its own answers, which it may know by heart, or these weights, "
            "this target or this data are others."
        ),
        evidence=[_said(accuracy), *_training_said(trained), *_served_as_expected(evidence)],
        next_step="Run firstlight drafter evaluate on the run folder: if that is as low, generate more and "
        "other answers; if it is not, export the checkpoint again and compare what was given here.",
    )


def lengths_of(evidence: Evidence) -> list[Bucket]:
    """The lengths at which enough first drafts were measured."""
    accuracy = evidence.accuracy
    return [b for b in accuracy.by_length if b.num >= MIN_TOKENS] if accuracy is not None else []


def _counts_own_tokens(evidence: Evidence, accuracy: Accuracy) -> bool:
    """Both were measured on held-out answers, and the figure of training is that of its own tokens."""
    trained, data = evidence.trained, evidence.data
    if trained is None or data is None or not (trained.is_held_out and data.held_out and trained.accuracy):
        return False
    said = trained.accuracy[0]
    return said > accuracy.accuracy[0] + BETTER and abs(said - accuracy.in_vocabulary) <= BETTER


def _training_said(trained: Trained | None) -> list[str]:
    if trained is None or not trained.accuracy:
        return []
    whose = "held-out answers" if trained.is_held_out else "its own training answers"
    return [f"training said {100 * trained.accuracy[0]:.1f} % of first drafts right, on {whose}"]


def best_variant(evidence: Evidence) -> VariantAccuracy | None:
    """The reading of the configuration that is clearly better than the given one."""
    accuracy = evidence.accuracy
    if accuracy is None or accuracy.num_tokens < MIN_TOKENS:
        return None
    better = [v for v in evidence.variants if v.key in _IN_CONFIG and _is_better(v, accuracy)]
    return max(better, key=lambda variant: variant.found.predicted_length, default=None)


def _is_better(variant: VariantAccuracy, given: Accuracy) -> bool:
    # The target's own head or embedding may suit a drafter that has learned little.
    least = MUCH_BETTER if variant.key in (variants.HEAD, variants.EMBEDDING) else BETTER
    found = variant.found
    longer = found.predicted_length - given.predicted_length
    is_longer = longer >= max(least * given.predicted_length, LEAST_LONGER)
    return is_longer and found.accuracy[0] >= given.accuracy[0] - BETTER


def _said(accuracy: Accuracy) -> str:
    shown = " ".join(f"{100 * value:.1f}" for value in accuracy.accuracy)
    return (
        f"{shown} % of {accuracy.num_tokens} drafts right, predicted acceptance length "
        f"{accuracy.predicted_length:.2f} at k = {accuracy.k}"
    )


def _rope(evidence: Evidence, best: VariantAccuracy) -> list[str]:
    loaded = evidence.loaded
    return [f"drafter: {loaded.rope}; target: {loaded.target_rope}"] if best.key == variants.ROPE else []


def _served_as_expected(evidence: Evidence) -> list[str]:
    served, loop = evidence.served or evidence.engine, evidence.own_loop
    if served is None or loop is None:
        return []
    judged = ": the engine loses nothing" if reaches(served.acceptance_length, loop) else ""
    return [
        f"served {served.acceptance_length:.2f} ({served.source}), own loop "
        f"{loop.acceptance_length:.2f}{judged}"
    ]


CHECKS = (
    configured,
    rope_is_the_target_s,
    keeps_with_length,
    sees_no_future,
    says_what_the_target_says,
    learned,
)
