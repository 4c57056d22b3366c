"""The judge on evidence alone: each check by its numbers, the order of findings, and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firstlight.base.errors import UsageError
from firstlight.drafter.explain.evidence import (
    Bucket,
    DataFacts,
    DraftMatch,
    Evidence,
    Loaded,
    OwnLoop,
    Served,
    TeacherMatch,
    Trained,
    WeightMatch,
)
from firstlight.drafter.explain.finding import EXIT_CODES, Side, Sure
from firstlight.drafter.explain.judge import CHECKS, judge
from firstlight.drafter.explain.measured import MEASURED
from firstlight.drafter.explain.report import as_json, as_text
from firstlight.drafter.explain.served import read_metrics
from support.explain_evidence import accuracy, drafts, evidence, layer, states, variant


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
