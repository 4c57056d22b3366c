"""Percentiles, the terms of a request, and goodput."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.base.errors import UsageError
from firstlight.bench.measures import RequestRecord, median, meets, parse_limits, percentile, summarize


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_a_summary_of_nothing_is_none() -> None:
    assert summarize([]) is None


def test_a_summary() -> None:
    summary = summarize(float(value) for value in range(101))
    assert summary is not None
    assert (summary.count, summary.mean, summary.largest) == (101, 50, 100)
    assert summary.percentiles == {50: 50, 90: 90, 95: 95, 99: 99}


def test_the_median_of_an_even_number_of_values_lies_between_the_middle_ones() -> None:
    assert median([4, 1, 3, 2]) == 2.5


def record(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "started_s": 10.0,
        "ended_s": 11.0,
        "text_times_s": (10.25, 10.5, 11.0),
        "num_output_tokens": 4,
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def test_the_terms_of_a_request() -> None:
    assert record().ttft_s == 0.25
    assert record().e2e_s == 1.0
    assert record().tpot_s == 0.25
    assert record().gaps_s == [0.25, 0.5]


def test_one_token_has_no_time_per_further_token() -> None:
    assert record(num_output_tokens=1).tpot_s is None


def test_an_answer_without_visible_text_begins_when_it_ends() -> None:
    assert record(text_times_s=()).ttft_s == 1.0


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 250}, True),
        ({"ttft": 249}, False),
        ({"tpot": 250, "e2e": 1000}, True),
        ({"e2e": 999}, False),
    ],
)
def test_goodput_takes_all_limits(limits: dict[str, float], good: bool) -> None:
    assert meets(record(), limits) is good


def test_a_failed_request_is_never_good() -> None:
    assert not meets(record(error="500: no"), {"e2e": 10_000})


def test_limits_in_their_spellings() -> None:
    assert parse_limits(["ttft:500 tpot:50", "e2el:3e3"]) == {"ttft": 500, "tpot": 50, "e2e": 3000}
    assert parse_limits(["ttft:500,tpot:50"]) == {"ttft": 500, "tpot": 50}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "speed:5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_limits([text])
