"""No sentence of `explain` claims more than was measured."""

from __future__ import annotations

import pytest

from firstlight.drafter.explain.evidence import (
    Bucket,
    DataFacts,
    OwnLoop,
    Served,
    Trained,
)
from firstlight.drafter.explain.finding import Side
from firstlight.drafter.explain.judge import judge
from firstlight.drafter.explain.report import as_text
from support.explain_evidence import accuracy, drafts, evidence, layer, states


def test_an_engine_that_could_not_be_asked_is_no_all_clear() -> None:
    """As where a busy machine has no memory left for it: nothing found wrong is not "fine"."""
    found = evidence(drafts=[], weights=None, notes=["the engine did not start with the drafter: no room."])
    verdict = judge(found)
    assert (verdict.side, verdict.cause, verdict.exit_code) == (Side.NOT_MEASURED, "", 24)
    text = as_text(found, verdict)
    assert text.startswith("Verdict: not measured\n")
    assert "clears nobody" in " ".join(text.split())
    assert "no room." in text


def test_drafts_that_a_fault_reproduces_are_no_near_ties() -> None:
    """The keys of drafts that are kept cost nothing on a few answers, and are a fault all the same."""
    later = drafts("later", 0.9, best_variant="stale-keys", best_what="stale keys", best_agreement=0.99)
    verdict = judge(
        evidence(
            drafts=[drafts("first", 1.0), later],
            engine=Served(acceptance_length=2.13, k=3, source="the engine in this process"),
            engine_loop=OwnLoop(k=3, acceptance_length=2.13, low=1.7, high=2.6),
        )
    )
    assert verdict.cause == "draft keys are not made anew from the target's states after verification"


@pytest.mark.parametrize(
    ("trained", "data", "said"),
    [
        (Trained(step=9, accuracy=[0.6], is_held_out=True), True, True),
        (Trained(step=9, accuracy=[0.6], is_held_out=False), True, False),  # its own answers, by heart
        (Trained(step=9, accuracy=[0.6], is_held_out=True), False, False),
        (Trained(step=9, accuracy=[0.9], is_held_out=True), True, False),  # no such figure was measured
    ],
)
def test_how_training_counted_is_said_only_where_it_was_measured(
    trained: Trained, *, data: bool, said: bool
) -> None:
    verdict = judge(
        evidence(
            accuracy=accuracy(0.4, coverage=0.7, in_vocabulary=0.58),
            trained=trained,
            data=DataFacts(num_documents=9, held_out=data),
        )
    )
    assert ("among its own tokens only" in verdict.findings[0].said) == said
    whose = "held-out answers" if trained.is_held_out else "its own training answers"
    assert any(text.endswith(whose) for text in verdict.findings[0].evidence)


def test_length_is_said_as_far_as_it_was_looked_at() -> None:
    short = [Bucket(end=64, num=100, accuracy=0.5)]
    long = [*short, Bucket(end=512, num=100, accuracy=0.5)]
    assert not [p for p in judge(evidence(accuracy=accuracy(by_length=short))).passed if "length" in p]
    passed = judge(evidence(accuracy=accuracy(by_length=long, longest=384))).passed
    assert [p for p in passed if p.endswith("as far as it was looked at: up to 384 tokens.")]


def test_more_training_is_no_advice_where_training_was_good() -> None:
    low = accuracy(0.0, 1.0, accuracy=[0.0] * 3, conditional=[0.0] * 3)
    verdict = judge(evidence(accuracy=low, trained=Trained(step=9, accuracy=[0.7], is_held_out=True)))
    assert verdict.cause == "the drafter is not as good as its training said"
    assert "train on" not in verdict.findings[0].next_step
    unknown = judge(evidence(accuracy=low))
    assert unknown.cause == "too little was learned"
    assert "is not known here" in unknown.findings[0].next_step
    few = judge(evidence(accuracy=accuracy(0.0, 1.0, num_tokens=9)))
    assert few.side is Side.FINE
    assert not [promise for promise in few.passed if "right often enough" in promise]


def test_what_another_finding_hides_is_not_said_to_be_in_order() -> None:
    wrong = [
        states("prefill", layers=[layer(2, 0.5, 3, 0.9999)]),
        states("decode", layers=[layer(2, 0.5, 3, 1)]),
    ]
    passed = judge(evidence(states=wrong, drafts=[drafts("first", 0.2), drafts("later", 0.2)])).passed
    assert not [p for p in passed if "one by one" in p or "after a verification" in p]
