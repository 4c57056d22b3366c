"""The trial of a drafter: it says how often drafts are right, leaves nothing, and is made once for a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.engine.worker import drafter_trial, remembered_trials
from firstlight.engine.worker.drafter_trial import in_words, memory_for, try_drafter
from firstlight.engine.worker.remembered_trials import TrialMemory
from firstlight.engine.worker.step_times import measure_step_times
from support.eagle3 import SIZES, VOCABULARY, write_pair
from support.engines import Harness, submit


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    target, drafter = write_pair(tmp_path_factory.mktemp("pair"))
    return Harness(target, dtype="auto", cpu_kernels="native", drafter=str(drafter), draft_tokens=2, **SIZES)


@pytest.fixture(autouse=True)
def _long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(drafter_trial, "LIMIT_S", 60.0)
    monkeypatch.setattr("firstlight.engine.worker.step_times.DRAFT_BUDGET_S", 60.0)


def assert_nothing_stays(engine: Harness) -> None:
    assert_nothing_stays_of(engine)
    engine.run([submit("after", range(3, 20))])


def assert_nothing_stays_of(engine: Harness) -> None:
    speculation = engine.core.speculation
    assert speculation is not None
    stats = engine.core.scheduler.stats()
    assert (stats.num_running, stats.pages_used, stats.pages_cached, stats.cache_query_tokens) == (0, 0, 0, 0)
    assert (speculation.counts.num_verified, speculation.counts.num_plain) == (0, 0)
    assert speculation.policy.forced is None
    assert speculation.policy.adapts


def test_it_says_what_a_draft_takes_and_how_often_it_is_right(engine: Harness) -> None:
    engine.fresh()
    engine.core.begin(measure_step_times(engine.core, VOCABULARY))
    report = try_drafter(engine.core, 1)
    assert report is not None
    assert (report["draft_tokens"], report["num_prompts"], report["is_complete"]) == (
        2,
        drafter_trial.NUM_PROMPTS,
        True,
    )
    assert report["num_tokens"] == drafter_trial.NUM_PROMPTS * drafter_trial.ANSWER_TOKENS
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
        assert report["draft_ms"] == {}  # no step was timed
        said.append(report)
    assert said[0] == said[1]


def test_when_the_time_is_up_the_start_goes_on(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_trial, "LIMIT_S", 0.0)
    engine.fresh()
    report = try_drafter(engine.core, None)
    assert report is not None
    assert not report["is_complete"]
    assert in_words(report) == "the drafter could not be tried in time"
    assert_nothing_stays(engine)


def test_where_no_sequence_is_left_to_draft_for_the_start_goes_on(engine: Harness) -> None:
    drafter = engine.started.section.drafter
    sizes = {**SIZES, "max_model_len": 3, "drafter": drafter, "draft_tokens": 2}
    short = Harness(engine.started.checkpoint.path, dtype="auto", cpu_kernels="native", **sizes)
    short.core = short.started.core(short.started.runner.run)  # which has not begun yet
    short.core.begin(measure_step_times(short.core, VOCABULARY))
    report = try_drafter(short.core, 1)
    assert report is not None
    assert (report["draft_ms"], report["acceptance_length"]) == ({}, None)
    assert in_words(report) == "the drafter could not be tried in time"
    assert_nothing_stays_of(short)


def test_prompt_lookup_is_not_tried(engine: Harness) -> None:
    target = engine.started.checkpoint.path
    assert try_drafter(Harness(target, drafter="ngram", **SIZES).core, 1) is None
    assert try_drafter(Harness(target, **SIZES).core, 1) is None


# --- what an earlier start found ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path))
    return tmp_path / remembered_trials.FOLDER


def start_again(engine: Harness) -> dict[str, Any]:
    engine.fresh()
    engine.core.begin(measure_step_times(engine.core, VOCABULARY))
    report = try_drafter(engine.core, 1, memory_for(engine.started))
    assert report is not None
    assert_nothing_stays(engine)
    return report


def gains_of(engine: Harness) -> list[float]:
    speculation = engine.core.speculation
    assert speculation is not None
    return [speculation.policy.acceptance.gain(num) for num in (1, 2)]


def test_only_the_first_start_of_a_pair_is_tried(
    engine: Harness, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_again(engine)
    (path,) = cache.iterdir()
    kept = msgspec.json.decode(path.read_bytes(), type=remembered_trials.Kept)
    # The second start could not try anything: the time is up at once.
    monkeypatch.setattr(drafter_trial, "LIMIT_S", 0.0)
    second = start_again(engine)
    assert second["remembered_from"] == kept.date
    assert second["draft_ms"].keys() == first["draft_ms"].keys() == {"1", "2"}  # times are always measured
    changing = {"draft_ms": None, "remembered_from": None}
    assert second | changing == first | changing
    assert in_words(second).endswith(f"; acceptance remembered from {kept.date}")
    assert "remembered" not in in_words(first)


def test_what_is_remembered_counts_as_much_as_what_was_just_tried(engine: Harness, cache: Path) -> None:
    gains = []
    for _ in range(2):
        engine.fresh()
        assert try_drafter(engine.core, 1, memory_for(engine.started)) is not None
        gains.append(gains_of(engine))
    assert gains[0] == gains[1]


def test_a_trial_that_was_cut_short_is_not_remembered(
    engine: Harness, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_trial, "LIMIT_S", 0.0)
    assert not start_again(engine)["is_complete"]
    assert not cache.exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:20], "it cannot be read"),
        (lambda content: b"\xff" + content, "it cannot be read"),
        (lambda content: content.replace(b'"num_verified":', b'"num_verified":-'), "not of these weights"),
        (lambda content: content.replace(b'"key":"', b'"key":"0'), "not of these weights"),
        (lambda content: content.replace(b'"drafted":[', b'"drafted":[5,'), "not of these weights"),
    ],
)
def test_a_file_that_is_broken_or_of_others_is_left_aside_with_a_line(
    engine: Harness, cache: Path, damage: Any, words: str
) -> None:
    start_again(engine)
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    report = start_again(engine)
    assert report["remembered_from"] is None
    assert report["is_complete"]
    assert f"{path} is left aside" in in_words(report)
    assert words in in_words(report)
    assert start_again(engine)["remembered_from"] is not None  # it was written anew


def test_a_folder_that_cannot_be_written_ends_no_start(engine: Harness, cache: Path) -> None:
    cache.write_text("a file in the folder's place")
    report = start_again(engine)
    assert report["is_complete"]
    assert "the trial is not remembered" in in_words(report)


def test_other_weights_and_other_settings_are_tried_for_themselves(
    engine: Harness, tmp_path: Path, cache: Path
) -> None:
    started = engine.started
    weights = tmp_path / "drafter"
    weights.mkdir()
    for file in Path(started.section.drafter or "").iterdir():
        (weights / file.name).write_bytes(file.read_bytes())

    def path(**changes: Any) -> Path:
        section = msgspec.structs.replace(started.section, drafter=str(weights), **changes)
        return TrialMemory.of(started.checkpoint, section, started.report, (1, 2, 3)).path

    same = path()
    file = next(weights.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = {
        same,
        path(),
        path(draft_tokens=1),
        path(draft_verification="rejection"),
        path(tensor_parallel=2),
    }
    assert len(found) == 5
    content[-1] ^= 1
    file.write_bytes(content)
    assert path() == same


def test_few_files_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_trials, "MOST_KEPT", 2)
    tried = remembered_trials.Tried(1, 2, 1, [1], [1], [0], 1)
    for key in "abcd":
        TrialMemory(key, cache).keep(tried)
    assert len(list(cache.iterdir())) == 2
    last = TrialMemory("d", cache).recall(1)
    assert last is not None
    assert last.tried == tried
