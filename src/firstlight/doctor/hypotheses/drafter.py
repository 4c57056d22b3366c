"""A drafter (speculative decoding) that is missing or does not belong to the model.

Invariant: where nothing asks for speculation, the drafter is excluded.
"""

from __future__ import annotations

import re

from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import about, arguments, has_arguments, line_clue
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight

_ASKS = (
    ("--speculative-config", "speculative_config"),
    ("--speculative-algorithm", "speculative_algorithm"),
    ("--speculative-algo", "speculative_algo"),
    ("--speculative-model", "speculative_model"),
    ("--speculative-draft-model-path", "speculative_draft_model_path"),
    ("--drafter", "drafter"),
)
_OFF = ("none", "null", "")
_WORDS = (
    r"AttributeError: .{0,120}(?:set_embed|hot_token_id|get_embed_and_head|fc\b)",
    r"[Dd]raft.{0,80}(?:vocab|hidden[_ ]size).{0,60}(?:mismatch|does not match|differ|must)",
    r"(?:vocab|hidden)[_ ]?size.{0,80}draft.{0,60}(?:mismatch|does not match|differ|must)",
    r"size mismatch for .{0,80}(?:fc|d2t|t2d|midlayer|eagle|draft)",
    r"failed to load draft model",
    r"draft model.{0,80}(?:not found|does not exist|not supported|is required)",
    r"[Tt]he drafter .{0,300} holds (?:no|several)",
    r"so it is no drafter",
    r"is no EAGLE-3 drafter",
    r"--drafter .{0,300}(?:there is no|is no drafter)",
    r"(?:Eagle3?|EAGLE-?3?|MTP)\w*.{0,60}(?:not supported|is not (?:a )?valid|Cannot find model)",
)
_ACCEPTANCE = re.compile(r"(?:accept len|[Mm]ean acceptance length): *([0-9.]+)")
_NOTHING_ACCEPTED = 1.02
_MIN_SAMPLES = 3


def _mismatch(view: View) -> Judgement | None:
    asked = _asked(view)
    words = stated(view, *_WORDS)
    lengths = _lengths(view)
    if asked is None and words is None and not lengths:
        if not has_arguments(view):
            return None
        return Judgement(vetoes=(Clue(text=_nothing(view), evidence=_argument_line(view)),))
    supports = [words[0]] if words else []
    low = [clue for length, clue in lengths if length <= _NOTHING_ACCEPTED]
    if len(lengths) >= _MIN_SAMPLES and len(low) == len(lengths):
        supports.append(
            Clue(
                text=f"nothing that is drafted is ever accepted: {low[-1].text}",
                evidence=low[-1].evidence,
                weight=Weight.PROOF if len(low) > _MIN_SAMPLES else Weight.STRONG,
                group="acceptance",
            )
        )
    if not supports:
        fine = [clue for length, clue in lengths if length > _NOTHING_ACCEPTED]
        if fine:
            return Judgement(
                vetoes=(Clue(text=f"drafts are accepted: {fine[-1].text}", evidence=fine[-1].evidence),)
            )
        return Judgement() if view.is_starting and view.has_stopped_moving else None
    is_slow = not words
    return Judgement(
        supports=tuple(supports),
        subject=words[1] if words else None,
        condition=Condition.SLOW if is_slow else None,
        summary=f"the drafter does not belong to the model: {supports[0].text}.",
        fills={"algorithm": asked or "ALGORITHM"},
    )


def _asked(view: View) -> str | None:
    """What was asked for, if anything."""
    for names in _ASKS:
        for value, _ in arguments(view, *names):
            if value.lower() not in _OFF:
                return value
    return None


def _nothing(view: View) -> str:
    told = next((value for names in _ASKS for value, place in arguments(view, *names) if place), None)
    said = f" (the log says {told})" if told is not None else ""
    return f"nothing asks for speculative decoding{said}, so that no drafter is loaded"


def _argument_line(view: View) -> tuple[str, ...]:
    told = tuple(place for names in _ASKS for _, place in arguments(view, *names))[:1]
    return told or about(view)


def _lengths(view: View) -> list[tuple[float, Clue]]:
    """Accept lengths by the log: one and the bonus token is all that is accepted at 1.00."""
    found = []
    for line in view.lines:
        match = _ACCEPTANCE.search(line.text)
        if match and match[1].count(".") <= 1 and match[1] != ".":
            found.append((float(match[1]), line_clue(line, Weight.SOME)))
    return found


MISMATCH = Hypothesis(
    Card(
        cause="drafter-mismatch",
        title="the drafter is missing or does not belong to the model",
        condition=Condition.DEAD,
        signs=(
            "an error while the drafter is loaded: AttributeError of set_embed or hot_token_id, vocabulary, "
            "shape",
            "accept length 1.00 throughout, and no error (EAGLE for an EAGLE-3 drafter)",
            "a folder without config.json or without weights is given as the drafter",
        ),
        vetoes=("no drafter was asked for", "drafts are accepted"),
        next_test="compare the two config.json: vocab_size (or a d2t map), hidden_size, architectures "
        "against the algorithm ({algorithm}), heads divisible by the tensor parallel size; start once "
        "without the drafter.",
        remedies=Remedies(
            native="leave out `--drafter`, or give one that was made for {model}: what does not fit ends the "
            "start.",
            vllm="leave out `--speculative-config`, or give it the drafter and `method` (eagle, eagle3) "
            "that belong to {model}.",
            sglang="leave out `--speculative-algorithm` and `--speculative-draft-model-path`, or give those "
            "that belong to {model} (EAGLE3 for an EAGLE-3 drafter: EAGLE accepts it silently).",
        ),
        looks=(Look.LOGS, Look.EXITS),
    ),
    _mismatch,
)
HYPOTHESES = (MISMATCH,)
