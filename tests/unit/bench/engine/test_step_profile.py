"""The report of a profile: shares, findings, what the plan says beside it, and the picture."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from firstlight.bench.engine.step_prediction import Given, predict
from firstlight.bench.engine.step_profile_report import StepProfile, make_report, plot, tables
from firstlight.bench.report import save_json
from firstlight.engine.messages import Profile, StepGroup
from firstlight.ops.step_clock import WORDS
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.experts import kimi, write_experts

MB = 1e6


def kinds(**milliseconds: float) -> dict[str, float]:
    named = {"matrices": "matrix products", "collectives": "collectives", "python": "Python"}
    return {word: 0.0 for word in WORDS.values()} | {
        named[name]: value / 1e3 for name, value in milliseconds.items()
    }


def profile_of(kinds_s: list[dict[str, float]], num_steps: int = 1, **sizes: Any) -> Profile:
    wall_s = [sum(rank.values()) * num_steps for rank in kinds_s]
    summed = [{word: seconds * num_steps for word, seconds in rank.items()} for rank in kinds_s]
    size = {"num_sequences": 1, "num_rows": 1, "context_tokens": 100.0, **sizes}
    group = StepGroup(num_steps=num_steps, wall_s=wall_s, kinds_s=summed, **size)
    return Profile(
        num_ranks=len(kinds_s),
        num_steps=num_steps,
        num_plain_steps=num_steps,
        num_other_steps=1,
        window_s=10.0,
        other_s=1.0,
        idle_s=2.0,
        overhead=0.004,
        groups=[group],
    )


def info(path: Path | str = "/models/none", device: str = "cpu") -> dict[str, Any]:
    return {
        "config": {"model": {"path": str(path)}, "engine": {"device": device}},
        "startup_report": {"backend": "test", "kv_dtypes": ["float16", "float16"]},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description()
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "m", description, random_weights(description))


def text_of(report: StepProfile) -> str:
    console = Console(width=240, file=StringIO())
    with console.capture() as shown:
        for table in tables(report):
            console.print(table)
    return shown.get()


def test_shares_add_up_and_the_late_rank_is_named() -> None:
    slow, waits = kinds(matrices=6, collectives=1, python=3), kinds(matrices=2, collectives=5, python=3)
    report = make_report(profile_of([waits, slow], 50), info(), None, ["a note"])
    assert [rank.sum_of_shares for rank in report.ranks] == pytest.approx([1.0, 1.0])
    assert [rank.step_s for rank in report.ranks] == pytest.approx([0.01, 0.01])
    assert report.ranks[0].shares["collectives"] == pytest.approx(0.5)
    text = text_of(report)
    assert "the others wait there for rank 1" in text
    assert "a note" in text
    assert "50 of 1 sequence" in text
    assert "+0.4 %" in text
    assert "drafting" not in text  # nothing was
    assert "100.0 %" in text


@pytest.mark.parametrize(("overhead", "is_doubtful"), [(None, False), (0.04, False), (0.12, True)])
def test_shares_are_doubtful_where_recording_costs_much(overhead: float | None, is_doubtful: bool) -> None:
    profile = replace(profile_of([kinds(matrices=6, python=3)], 50), overhead=overhead)
    text = text_of(make_report(profile, info(), None, []))
    assert ("+12 % from those between: the shares are doubtful" in text) is is_doubtful


def test_the_plan_stands_beside(folder: Path) -> None:
    profile = profile_of([kinds(matrices=6, collectives=4)] * 2, 10)
    given = Given(memory_bytes_per_s=100 * MB, all_reduce=((64, 100e-6), (4096, 100e-6)))
    predicted = predict(profile, info(folder), given)
    num_layers = tiny_description().num_layers
    assert predicted.kinds_s["collectives"] == pytest.approx(2 * num_layers * 100e-6)
    assert predicted.kinds_s["matrix products"] > 0.0
    assert predicted.kinds_s["attention"] > 0.0  # reading keys and values
    assert predicted.kinds_s["experts"] == 0.0
    assert "--memory-rate" in predicted.notes[0]
    report = make_report(profile, info(folder), predicted, predicted.notes)
    assert f"collectives take {0.004 / (2 * num_layers * 100e-6):.1f} times" in text_of(report)


def test_steps_of_more_rows_read_more_experts(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "m", kimi(vocab_size=96))
    given = Given(local_bytes_per_s=100 * MB)
    one = predict(profile_of([kinds(python=1)]), info(path), given)
    many = predict(profile_of([kinds(python=1)], num_rows=8), info(path), given)
    assert many.kinds_s["experts"] > one.kinds_s["experts"] > 0.0
    assert many.kinds_s["matrix products"] == pytest.approx(one.kinds_s["matrix products"])
    assert "measured here now" in one.notes[0]
    assert one.kinds_s["collectives"] == 0.0


def test_a_gpu_has_the_plan_s_own_rates(folder: Path) -> None:
    predicted = predict(profile_of([kinds(python=1)]), info(folder, "cuda"), Given(local_bytes_per_s=1.0))
    assert "1,800 GB/s (assumed" in predicted.notes[0]
    assert predicted.kinds_s["other operators"] >= tiny_description().num_layers * 30e-6


def test_picture_and_numbers_are_stored(tmp_path: Path, folder: Path) -> None:
    profile = profile_of([kinds(matrices=6, collectives=4)] * 2, 10)
    report = make_report(profile, info(folder), predict(profile, info(folder), Given()), [])
    plot(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    save_json(tmp_path / "a.json", "profile", report)
    assert '"collectives"' in (tmp_path / "a.json").read_text()
