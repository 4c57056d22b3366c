"""The judge on evidence alone: each check by its numbers, the order of findings, and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firstlight.base.errors import UsageError
from firstlight.drafter.explain.evidence import (
    Accuracy,
    Bucket,
    DataFacts,
    DraftMatch,
    Evidence,
    LayerMatch,
    Loaded,
    OwnLoop,
    Served,
    StatesMatch,
    TeacherMatch,
    Trained,
    VariantAccuracy,
    WeightMatch,
)
from firstlight.drafter.explain.finding import EXIT_CODES, Side, Sure
from firstlight.drafter.explain.judge import CHECKS, judge
from firstlight.drafter.explain.measured import MEASURED
from firstlight.drafter.explain.report import as_json, as_text
from firstlight.drafter.explain.served import read_metrics

LAYERS = (2, 15, 27)


def accuracy(first: float = 0.6, length: float = 2.2, **changes: Any) -> Accuracy:
    rates = [first, first - 0.1, first - 0.15]
    values = {"k": 3, "num_tokens": 500, "accuracy": rates, "conditional": rates, "predicted_length": length}
    return Accuracy(**{**values, "in_vocabulary": first, **changes})


def states(stage: str, **changes: Any) -> StatesMatch:
    fits = [
        LayerMatch(layer=layer, cosine=0.9999, relative_l2=0.01, best_layer=layer, best_cosine=0.9999)
        for layer in (*LAYERS, 30)
    ]
    return StatesMatch(**{"stage": stage, "num_tokens": 500, "layers": fits, **changes})


def drafts(situation: str, agreement: float, **changes: Any) -> DraftMatch:
    return DraftMatch(
        situation=situation, num=100, by_position=[agreement] * 3, agreement=agreement, **changes
    )


def evidence(**changes: Any) -> Evidence:
    """Of a drafter of which everything is right."""
    values: dict[str, Any] = {
        "target": "target",
        "drafter": "drafter",
        "loaded": Loaded(layers=list(LAYERS), rope="theta 10000", target_rope="theta 10000"),
        "data": DataFacts(
            num_documents=50, num_rendered=50, supervised_share=0.5, mask_shifts={0: 50}, held_out=True
        ),
        "states": [states(stage) for stage in ("stored", "prefill", "decode", "verify")],
        "teachers": [TeacherMatch(stage=stage, num=400, agreement=0.99) for stage in ("stored", "decode")],
        "greedy_agreement": 0.99,
        "accuracy": accuracy(),
        "own_loop": OwnLoop(k=3, acceptance_length=2.2, low=2.1, high=2.3),
        "leak": 0.0,
        "weights": [],
        "drafts": [drafts("first", 0.99), drafts("later", 0.98), drafts("cached", 0.99)],
    }
    return Evidence(**{**values, **changes})


def layer(number: int, cosine: float, best: int, best_cosine: float) -> LayerMatch:
    return LayerMatch(layer=number, cosine=cosine, relative_l2=0.5, best_layer=best, best_cosine=best_cosine)


def variant(key: str, first: float, length: float) -> VariantAccuracy:
    return VariantAccuracy(key=key, what=f"the change {key}", found=accuracy(first, length))


def test_nothing_wrong_is_fine() -> None:
    verdict = judge(evidence())
    assert (verdict.side, verdict.cause, verdict.findings, verdict.exit_code) == (Side.FINE, "", [], 0)
    assert len(verdict.passed) > 20


def test_what_was_not_measured_is_not_said_to_be_in_order() -> None:
    bare = Evidence(target="target", drafter="drafter", loaded=Loaded(error="cut off", remedy="Again."))
    verdict = judge(bare)
    assert verdict.cause == "the checkpoint does not load"
    assert verdict.passed == []
    whole = judge(evidence()).passed
    assert not {
        "Every rank holds the same states.",
        "A served engine reaches what the reference predicts.",
    } & {*whole}
    served = judge(evidence(served=Served(acceptance_length=2.2, k=3, source="as given"))).passed
    assert len(served) == len(whole) + 1


def test_every_check_says_whether_it_was_measured() -> None:
    assert set(MEASURED) == set(CHECKS)


@pytest.mark.parametrize(
    ("match", "in_engine", "fault"),
    [
        ({"num": 1, "agreement": 0.67}, 1.21, False),  # one round of a drafter that knows little
        ({"num": 100, "agreement": 0.9}, 1.21, False),
        ({"num": 1, "agreement": 0.67}, 1.10, True),  # and here it costs something
        ({"num": 100, "agreement": 0.8}, 1.21, True),
    ],
)
def test_near_ties_that_cost_nothing_are_no_fault(
    match: dict[str, Any], in_engine: float, *, fault: bool
) -> None:
    first = DraftMatch(**{"situation": "first", "by_position": [1.0, 1.0, match["agreement"]], **match})
    verdict = judge(
        evidence(
            drafts=[first],
            engine=Served(acceptance_length=in_engine, k=3, source="the engine in this process"),
            engine_loop=OwnLoop(k=3, acceptance_length=1.21, low=1.05, high=1.4),
        )
    )
    assert ("the engine drafts otherwise than the reference" in {f.cause for f in verdict.findings}) == fault


WRONG: dict[str, tuple[dict[str, Any], Side, str]] = {
    "loader": (
        {"loaded": Loaded(error="d2t is missing.", remedy="Export again.")},
        Side.INTEGRATION,
        "the checkpoint does not load",
    ),
    "target": ({"data": DataFacts(num_documents=1, changed=["weights"])}, Side.DATA, "another target"),
    "template file": (
        {"data": DataFacts(num_documents=1, changed=["chat template"])},
        Side.TEMPLATE,
        "another chat template",
    ),
    "rendering": (
        {"data": DataFacts(num_documents=9, num_rendered=9, num_rendered_otherwise=9)},
        Side.TEMPLATE,
        "the prompts are rendered otherwise",
    ),
    "empty mask": (
        {"data": DataFacts(num_documents=9, supervised_share=0.0, num_without_supervision=9)},
        Side.DATA,
        "the loss mask is empty",
    ),
    "shifted mask": (
        {"data": DataFacts(num_documents=9, mask_shifts={1: 9})},
        Side.DATA,
        "the loss mask is shifted",
    ),
    "tokens": (
        {"data": DataFacts(num_documents=9, num_other_tokens=3)},
        Side.DATA,
        "the stored tokens are others",
    ),
    "stored layer": (
        {"states": [states("stored", layers=[layer(2, 0.7, 1, 0.999), layer(30, 0.999, 30, 0.999)])]},
        Side.INTEGRATION,
        "the stored states are of other layers",
    ),
    "stored last state": (
        {"states": [states("stored", layers=[layer(2, 0.999, 2, 0.999), layer(30, 0.8, 29, 0.999)])]},
        Side.INTEGRATION,
        "the last state is of another block",
    ),
    "teacher": (
        {"teachers": [TeacherMatch(stage="decode", num=400, agreement=0.4)]},
        Side.INTEGRATION,
        "the last state is no teacher",
    ),
    "target decode": ({"greedy_agreement": 0.5}, Side.INTEGRATION, "the target itself is served wrongly"),
    "prefill": (
        {"states": [states("prefill", layers=[layer(2, 0.5, 3, 0.9999), layer(30, 1, 30, 1)])]},
        Side.INTEGRATION,
        "the engine captures state 3 as state 2",
    ),
    "decode": (
        {
            "states": [
                states("prefill"),
                states("decode", layers=[layer(2, 0.5, 4, 0.6), layer(30, 1, 30, 1)]),
            ]
        },
        Side.INTEGRATION,
        "the engine computes states wrongly",
    ),
    "verify": (
        {
            "states": [
                states("prefill"),
                states("verify", layers=[layer(2, 0.5, 2, 0.5)], row_offset=1, row_offset_cosine=0.999),
            ]
        },
        Side.INTEGRATION,
        "the engine hands out states of other rows, 1 off",
    ),
    "ranks": (
        {"states": [states("2 ranks", ranks_gap=0.3, ranks_mean_cosine=0.95)]},
        Side.INTEGRATION,
        "per-rank partial sums are captured",
    ),
    "weights": (
        {"weights": [WeightMatch(name="lm_head.weight", relative_difference=0.5, is_the_target_s=True)]},
        Side.INTEGRATION,
        "lm_head.weight was overwritten after loading",
    ),
    "ids": (
        {"variants": [variant("ids-higher", 0.7, 2.6)]},
        Side.INTEGRATION,
        "the layer ids are one too low",
    ),
    "flag": (
        {"variants": [variant("norm-before-residual", 0.7, 2.6)]},
        Side.INTEGRATION,
        "norm_before_residual is configured the wrong way",
    ),
    "rope": (
        {"variants": [variant("rope", 0.7, 2.6)]},
        Side.INTEGRATION,
        "the rotary scaling was dropped or is another",
    ),
    "named drafts": (
        {"drafts": [drafts("first", 0.2, best_variant="fc", best_what="fc left out", best_agreement=1.0)]},
        Side.INTEGRATION,
        "fc is left out (the drafter runs as EAGLE, not as EAGLE-3)",
    ),
    "unnamed drafts": (
        {"drafts": [drafts("first", 0.2, best_variant="fc", best_what="fc left out", best_agreement=0.3)]},
        Side.INTEGRATION,
        "the engine drafts otherwise than the reference",
    ),
    "later drafts": (
        {"drafts": [drafts("first", 1.0), drafts("later", 0.6)]},
        Side.INTEGRATION,
        "draft state after a verification is wrong",
    ),
    "cached drafts": (
        {"drafts": [drafts("first", 1.0), drafts("later", 1.0), drafts("cached", 0.6)]},
        Side.INTEGRATION,
        "draft keys of cached prefixes are missing",
    ),
    "leak": ({"leak": 0.4}, Side.TRAINING, "training sees the future"),
    "vocabulary": (
        {
            "accuracy": accuracy(0.4, coverage=0.7),
            "trained": Trained(step=9, accuracy=[0.6], is_held_out=True),
        },
        Side.TRAINING,
        "the draft vocabulary lacks tokens",
    ),
    "too little": ({"accuracy": accuracy(0.2, 1.3)}, Side.TRAINING, "too little was learned"),
    "served": (
        {"served": Served(acceptance_length=1.0, k=3, source="as given")},
        Side.INTEGRATION,
        "the served engine loses drafts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_thing_wrong_is_named(name: str) -> None:
    changes, side, cause = WRONG[name]
    verdict = judge(evidence(**changes))
    assert (verdict.side, verdict.cause) == (side, cause), [f.cause for f in verdict.findings]
    assert verdict.exit_code == EXIT_CODES[side]
    for finding in verdict.findings:
        assert finding.evidence
        assert finding.next_step.endswith(".")


def test_better_ids_explain_a_low_accuracy() -> None:
    """A drafter whose ids are wrong did not learn too little."""
    changes = {"accuracy": accuracy(0.1, 1.1), "variants": [variant("ids-higher", 0.6, 2.2)]}
    verdict = judge(evidence(**changes))
    assert [finding.cause for finding in verdict.findings] == ["the layer ids are one too low"]


def test_the_target_s_head_must_be_much_better_to_be_named() -> None:
    assert judge(evidence(variants=[variant("head", 0.62, 2.4)])).side is Side.FINE
    assert judge(evidence(variants=[variant("head", 0.8, 3.4)])).side is Side.INTEGRATION


def test_what_is_served_as_predicted_is_the_training_s() -> None:
    low = {
        "accuracy": accuracy(0.2, 1.45),
        "own_loop": OwnLoop(k=3, acceptance_length=1.45, low=1.4, high=1.5),
    }
    verdict = judge(evidence(**low, served=Served(acceptance_length=1.43, k=3, source="as given")))
    assert (verdict.side, verdict.cause) == (Side.TRAINING, "too little was learned")
    assert any("loses nothing" in text for text in verdict.findings[0].evidence)


def test_proof_counts_before_suspicion_and_then_what_comes_first() -> None:
    changes = {
        "accuracy": accuracy(0.2, 1.3),
        "weights": [WeightMatch(name="lm_head.weight", relative_difference=0.5, is_the_target_s=False)],
        "data": DataFacts(num_documents=9, mask_shifts={1: 9}),
    }
    verdict = judge(evidence(**changes))
    assert [finding.cause for finding in verdict.findings] == [
        "the loss mask is shifted",
        "lm_head.weight was overwritten after loading",
        "too little was learned",
    ]
    assert [finding.sure for finding in verdict.findings] == [Sure.PROVED, Sure.PROVED, Sure.LIKELY]


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


def test_hints_decide_nothing() -> None:
    buckets = [Bucket(end=64, num=100, accuracy=0.8), Bucket(end=2048, num=100, accuracy=0.3)]
    loaded = Loaded(rope="theta 10000, scaling none", target_rope="theta 10000, scaling linear factor 4")
    repeated = DataFacts(num_documents=9, repeated_share=0.5)
    verdict = judge(evidence(accuracy=accuracy(by_length=buckets), loaded=loaded, data=repeated))
    assert (verdict.side, verdict.exit_code) == (Side.FINE, 0)
    assert {finding.cause for finding in verdict.findings} == {
        "accuracy falls with length",
        "the rotary tables differ",
        "many answers repeat themselves",
    }


def test_the_report_has_verdict_numbers_and_next_steps() -> None:
    found = evidence(leak=0.4, notes=["the engine did not start with the drafter: no room."])
    verdict = judge(found)
    text = as_text(found, verdict)
    assert text.startswith("Verdict: training (training sees the future)\n")
    assert "own loop 2.20 (2.10 to 2.30)" in text
    assert "next: Mend the attention mask" in text
    assert "Not measured:" in text
    assert max(map(len, text.splitlines())) <= 112
    values = json.loads(as_json(found, verdict))
    assert (values["verdict"], values["exit_code"]) == ("training", 20)
    assert values["findings"][0]["sure"] == "proved"
    assert values["evidence"]["leak"] == 0.4
    assert as_text(evidence(), judge(evidence())).startswith("Verdict: fine\n")


METRICS = {
    'firstlight:draft_verified_steps_total{drafter="eagle3",k="4"} 100\n'
    'firstlight:draft_accepted_tokens_total{drafter="eagle3",k="4"} 120\n': (2.2, 4),
    'vllm:spec_decode_num_drafts_total{engine="0"} 50\n'
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 16\n': (1.32, 3),
    'sglang:spec_accept_length{model_name="m"} 1.75\n': (1.75, 3),
}


@pytest.mark.parametrize("text", METRICS)
def test_a_server_s_metrics_are_read(text: str) -> None:
    served = read_metrics("# HELP x y\nother 3\n" + text, "url", 3)
    length, k = METRICS[text]
    assert (pytest.approx(length), k) == (served.acceptance_length, served.k)


def test_a_server_that_says_nothing_of_drafts_is_an_error() -> None:
    with pytest.raises(UsageError, match="says nothing of verified drafts"):
        read_metrics("firstlight:draft_verified_steps_total 0\n", "url", 3)
