"""The comparison with peers, as far as it is pure: what counts, what goes on, what the page says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from firstlight.base.errors import EngineError, UsageError
from peers import page
from peers.goals import best, goals, limits
from peers.measures import BY_NAME, MEASURES, are_right, figure, num_right
from peers.results import ANSWER, LIMITS, Results, Sample, load, save, start_or_resume
from peers.schedule import Schedule
from peers.settings import OPENVINO, OURS, VLLM, Places, settings
from peers.subjects import chat_text, report_of

ALL = settings(Places(Path("/peers"), Path("/vllm"), Path("/m/model.gguf")), 2)
RIGHT = ["It is Paris.", "Tokyo it is", "cold", "Spanish", "4", "7 days", "blue", "I do not know."]
WRONG = ["It is Lyon.", *RIGHT[1:]]


def results_of(*figures: tuple[int, str, str, float], answers: dict[str, list[str]] | None = None) -> Results:
    """Every setting with a figure has answered rightly, unless `answers` says what."""
    results = Results(rounds=2, threads=2, model="/m/model.gguf", provenance={"processor": "P"})
    for name in dict.fromkeys(setting for _, setting, _, _ in figures):
        if name != LIMITS:
            texts = (answers or {}).get(name, RIGHT)
            results.add(Sample(round=1, setting=name, measure=ANSWER, texts=texts))
    for number, setting, measure, value in figures:
        results.add(Sample(round=number, setting=setting, measure=measure, value=value, took_s=2.0))
    return results


def setting(name: str):
    return next(one for one in ALL if one.name == name)


def test_the_names_of_settings_and_measures_are_unique() -> None:
    assert len({one.name for one in ALL}) == len(ALL)
    assert len(BY_NAME) == len(MEASURES)
    assert len({measure.seed(r) for measure in MEASURES for r in range(1, 6)}) == 5 * len(MEASURES)


@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "expected"),
    [
        ("decode_1", [(0.1, 1.37, 128), (0.1, 1.37, 128)], 2.74, 100.0),
        ("crowd_8", [(0.5, 4.0, 128)] * 8, 4.0, 256.0),
        ("prefill_512", [(0.5, 0.5, 1)] * 3, 1.5, 1024.0),
        ("first_64", [(0.1, 0.1, 1)] * 5, 0.5, 100.0),
    ],
)
def test_a_figure_follows_from_a_drivers_answer(
    name: str, requests: list[tuple[float, float, int]], duration_s: float, expected: float
) -> None:
    measure = BY_NAME[name]
    report = report_of({"requests": requests, "duration_s": duration_s}, measure)
    assert figure(measure, report) == pytest.approx(expected)


def test_an_answer_that_is_too_short_is_no_figure() -> None:
    report = report_of(
        {"requests": [(0.1, 1.0, 100), (0.1, 1.0, 128)], "duration_s": 2.0}, BY_NAME["decode_1"]
    )
    with pytest.raises(EngineError, match="228 tokens came, not 256"):
        figure(BY_NAME["decode_1"], report)


def test_answers_are_read_and_judged() -> None:
    body = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": RIGHT[0]}}]})
    assert chat_text(body) == RIGHT[0]
    assert (num_right(RIGHT), num_right(WRONG)) == (7, 6)
    assert are_right(RIGHT)
    assert not are_right(WRONG)


def test_a_run_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = start_or_resume(path, rounds=2, threads=2, model="m", fresh=False)
    results.add(Sample(round=1, setting=OURS, measure="decode_1", value=1.0))
    save(path, results)
    again = start_or_resume(path, rounds=5, threads=2, model="m", fresh=False)
    assert (again.samples, again.rounds) == (results.samples, 5)
    assert path.read_text().count("\n") == len(path.read_text().splitlines())
    assert start_or_resume(path, rounds=5, threads=2, model="m", fresh=True).samples == []
    with pytest.raises(UsageError, match="another machine"):
        start_or_resume(path, rounds=5, threads=4, model="m", fresh=False)
    path.write_text("half")
    with pytest.raises(UsageError, match="no results"):
        load(path)


def test_what_was_measured_is_not_measured_again() -> None:
    schedule = Schedule(ALL, MEASURES)
    results = results_of(*((1, OURS, m.name, 1.0) for m in MEASURES if m.name != "crowd_8"))
    assert [m.name for m in schedule.needs(results, setting(OURS), 1)] == ["crowd_8"]
    assert len(schedule.needs(results, setting("vllm eager"), 1)) == len(MEASURES)


def test_a_setting_goes_on_with_what_it_is_good_at() -> None:
    schedule = Schedule(ALL, MEASURES)
    results = results_of(
        (1, "openvino int8 f32", "prefill_512", 160.0),
        (1, "openvino int4 f32", "prefill_512", 120.0),
        (1, "openvino int8 f32", "crowd_8", 200.0),
        (1, "openvino int4 f32", "crowd_8", 230.0),
        (1, "openvino int8 f32", "memory", 300.0),
        (1, "openvino int4 f32", "memory", 500.0),
        (1, "openvino gguf f32", "prefill_512", 900.0),
        answers={"openvino gguf f32": WRONG},
    )
    names = [m.name for m in schedule.needs(results, setting("openvino int8 f32"), 2)]
    assert {"prefill_512", "crowd_8", "memory", "crowd_32"} <= set(names)
    slow = [m.name for m in schedule.needs(results, setting("openvino int4 f32"), 2)]
    assert "crowd_8" in slow
    assert not {"prefill_512", "memory"} & set(slow)
    assert schedule.needs(results, setting("openvino gguf f32"), 2) == []
    assert (
        0 < schedule.remaining_s(results, 2, setting("openvino int4 f32")) < schedule.remaining_s(results, 1)
    )


def test_a_peer_goes_on_with_what_it_is_compared_in_and_keeps_up_with() -> None:
    schedule = Schedule(ALL, MEASURES)
    figures = [
        (1, name, "crowd_8", value) for name, value in (("openvino int8 f32", 90.0), ("vllm eager", 20.0))
    ]
    figures += [(1, "llama.cpp Q8_0", name, 60.0) for name in ("crowd_8", "decode_1")]
    figures += [(1, "llama.cpp Q8_0", "launch", 1.0), (1, OURS, "crowd_8", 150.0)]
    results = results_of(*figures)

    def goes_on(name: str) -> set[str]:
        return {m.name for m in schedule.needs(results, setting(name), 2)} & {"crowd_8", "decode_1", "launch"}

    assert goes_on("llama.cpp Q8_0") == {"decode_1", "launch"}
    assert goes_on("vllm eager") == {"launch"}
    assert "crowd_8" in goes_on("openvino int8 f32") & goes_on(OURS)


def test_who_stays_is_launched_once_and_who_is_slow_comes_seldom() -> None:
    schedule = Schedule(ALL, MEASURES)
    results = results_of((1, "vllm eager", "launch", 90.0))
    assert "launch" not in [m.name for m in schedule.needs(results, setting("vllm eager"), 2)]
    slow = setting("transformers")
    assert schedule.needs(results, slow, 2) == []
    assert schedule.needs(results, slow, 3)


def test_the_best_setting_is_valid_and_was_not_left_behind() -> None:
    figures = [(n, "openvino int8 f32", "crowd_8", 400.0 + n) for n in (1, 2, 3)]
    figures += [(1, "openvino int4 f32", "crowd_8", 900.0)]
    figures += [(n, "openvino int4 bf16", "crowd_8", 800.0) for n in (1, 2, 3)]
    results = results_of(*figures, answers={"openvino int4 bf16": WRONG})
    found = best(results, [OPENVINO], BY_NAME["crowd_8"])
    assert found is not None
    assert (found.setting, found.value, found.least, found.most) == ("openvino int8 f32", 402.0, 401.0, 403.0)


def full_results() -> Results:
    facts = {"weight_bytes": 1e8, "decode_operations": 2.5e8}
    facts |= {"prefill_64_operations": 1.4e10, "prefill_512_operations": 1.2e11}
    figures = [(1, LIMITS, "read_bytes_per_s", 2e10), (1, LIMITS, "int8_operations_per_s", 4e11)]
    ours = dict(launch=2.0, first_64=40.0, prefill_512=1100.0, decode_1=130.0, crowd_8=520.0, crowd_32=500.0)
    figures += [(1, OURS, name, value) for name, value in (ours | {"memory": 400.0}).items()]
    figures += [(1, "llama.cpp Q4_0", "decode_1", 100.0), (1, "llama.cpp Q4_0", "launch", 0.5)]
    figures += [(1, VLLM, "launch", 50.0), (1, VLLM, "crowd_8", 300.0), (1, VLLM, "crowd_32", 400.0)]
    theirs = dict(first_64=44.0, prefill_512=1000.0, crowd_8=400.0, crowd_32=380.0, memory=500.0)
    figures += [(1, "openvino int4 f32", name, value) for name, value in theirs.items()]
    results = results_of(*figures)
    results.facts = facts
    gap = {"rows_per_step": 0, "kl_mean": 1e-3, "kl_p99": 0.01, "agreement": 0.98}
    long = {"num_bytes": 100_000, "num_tokens": 9, "source": "a text", "kl_mean": 1e-3, "perplexity": 10.2}
    long |= {"reference_perplexity": 10.0}
    answer = {"question": "Q|?", "fast": "the same, not", "exact": "the same, but"}
    results.quality = {"gaps": [gap], "long_text": long, "answers": [answer]}
    return results


def test_goals_are_reached_or_not() -> None:
    found = {(goal.label, goal.wanted): (goal.found, goal.reached) for goal in goals(full_results())}
    verdicts = [reached for _, reached in found.values()]
    # decode, 8, 32, prefill, first token, launch twice, memory, two shares, KL, perplexity
    assert verdicts == [True, True, False, True, True, True, True, True, False, True, True, False]
    assert ("1.25x", False) in found.values()
    assert ("65%", False) in found.values()
    assert [goal.reached for goal in goals(results_of())] == [None] * 10


def test_limits_follow_from_the_rates() -> None:
    found = limits(full_results())
    assert found["decode_1"] == pytest.approx(200)
    assert found["prefill_512"] == pytest.approx(512 * 4e11 / 1.2e11)
    assert found["crowd_32"] < found["prefill_512"]
    assert limits(results_of()) == {}


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    results = full_results()
    results.notes = {VLLM: "a note"}
    results.add(Sample(round=1, setting="openvino int4 bf16", measure=ANSWER, texts=WRONG))
    results.add(Sample(round=1, setting=VLLM, measure="decode_1", error="broke\noff"))
    text = page.whole(results)
    assert "| **130 (1)** | 100 (1) Q4_0 |" in text
    assert "| openvino int4 bf16 |  | **wrong**, 6 of 8 | It is Lyon. / Tokyo it is /" in text
    assert "vllm, decode_1: broke off" in text
    assert "Q\\|?" in text
    assert "/m/" not in text
    assert page.without_places(results).model == "model.gguf"
    save(tmp_path / "r.json", results)
    assert page.whole(load(tmp_path / "r.json")) == text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plots")
    from peers.picture import draw

    draw(full_results(), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_stored_figures_name_no_path_of_the_machine() -> None:
    results = results_of((1, OURS, "decode_1", 1.0))
    results.quality = {"model": "/m/model.gguf", "gaps": []}
    assert b"/m/" not in msgspec.json.encode(page.without_places(results))
