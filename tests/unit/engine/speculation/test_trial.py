"""The trial of a drafter: it says what a draft takes and how often it is right, and leaves nothing."""

from __future__ import annotations

import pytest

from firstlight.engine.speculation import trial
from firstlight.engine.speculation.trial import in_words, try_drafter
from firstlight.engine.step_times import measure_step_times
from support.eagle3 import SIZES, VOCABULARY, write_pair
from support.engines import Harness, submit


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    target, drafter = write_pair(tmp_path_factory.mktemp("pair"))
    return Harness(target, dtype="auto", cpu_kernels="native", drafter=str(drafter), draft_tokens=2, **SIZES)


@pytest.fixture(autouse=True)
def _long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(trial, "LIMIT_S", 60.0)


def assert_nothing_stays(engine: Harness) -> None:
    speculation = engine.core.speculation
    assert speculation is not None
    stats = engine.core.scheduler.stats()
    assert (stats.num_running, stats.pages_used, stats.pages_cached, stats.cache_query_tokens) == (0, 0, 0, 0)
    assert (speculation.counts.num_verified, speculation.counts.num_plain) == (0, 0)
    assert speculation.policy.forced is None
    assert speculation.policy.adapts
    engine.run([submit("after", range(3, 20))])


def test_it_says_what_a_draft_takes_and_how_often_it_is_right(engine: Harness) -> None:
    engine.fresh()
    engine.core.begin(measure_step_times(engine.core, VOCABULARY))
    report = try_drafter(engine.core, 1)
    assert report is not None
    assert (report["draft_tokens"], report["num_prompts"], report["is_complete"]) == (
        2,
        trial.NUM_PROMPTS,
        True,
    )
    assert report["num_tokens"] == trial.NUM_PROMPTS * trial.ANSWER_TOKENS
    assert 1.0 <= report["acceptance_length"] <= 3.0
    assert report["accepted_per_drafted"] == pytest.approx((report["acceptance_length"] - 1) / 2, abs=0.1)
    assert report["draft_ms"].keys() == {"1", "2"}
    assert in_words(report).startswith(f"{report['acceptance_length']:.2f} tokens a step with 2 drafts")
    assert_nothing_stays(engine)


def test_the_same_start_says_the_same(engine: Harness) -> None:
    said = []
    for _ in range(2):
        engine.fresh()
        report = try_drafter(engine.core, 1)
        assert report is not None
        del report["draft_ms"]
        said.append(report)
    assert said[0] == said[1]


def test_when_the_time_is_up_the_start_goes_on(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.0)
    engine.fresh()
    report = try_drafter(engine.core, None)
    assert report is not None
    assert not report["is_complete"]
    assert in_words(report) == "the drafter could not be tried in time"
    assert_nothing_stays(engine)


def test_prompt_lookup_is_not_tried(engine: Harness) -> None:
    target = engine.started.checkpoint.path
    assert try_drafter(Harness(target, drafter="ngram", **SIZES).core, 1) is None
    assert try_drafter(Harness(target, **SIZES).core, 1) is None
