"""docs/doctor.md is what the code makes, and lists every cause."""

from __future__ import annotations

import re

from firstlight.doctor.hypotheses.registry import HYPOTHESES
from firstlight.doctor.hypothesis import Condition
from firstlight.doctor.report.exit_codes import EXIT_CODES
from firstlight.doctor.report.handbook import handbook
from shape.source import REPOSITORY


def test_the_page_is_the_one_that_the_cards_make() -> None:
    assert (REPOSITORY / "docs" / "doctor.md").read_text() == handbook(), "run `make docs`"


def test_every_cause_has_its_section_and_no_field_is_left_open() -> None:
    text = handbook()
    for hypothesis in HYPOTHESES:
        assert text.count(f"### {hypothesis.card.cause}\n") == 1
    assert re.findall(r"\{[a-z_]+\}", text) == []


def test_every_condition_has_an_exit_code_of_its_own() -> None:
    assert set(EXIT_CODES) == set(Condition)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not set(EXIT_CODES.values()) & set(range(1, 7))
