"""The phases: their order, and that nothing else is told as one."""

from __future__ import annotations

import pytest

from firstlight.base.blackbox.recorder import NoBox
from firstlight.base.phases import DRAFTER, PHASES, PLACES, PREPARE, PhaseReporter


def test_each_phase_has_its_place() -> None:
    assert list(PLACES) == list(PHASES)
    assert sorted(PLACES.values()) == list(range(len(PHASES)))
    assert PLACES[DRAFTER] < PLACES[PREPARE], "rank 0 alone has a drafter, and the others wait for it"


@pytest.mark.parametrize("phase", ["headers", "", "Weights"])
def test_what_is_no_phase_is_refused(phase: str) -> None:
    with pytest.raises(ValueError, match="is no phase"):
        PhaseReporter(NoBox()).report(phase)
