"""Which rank a start is as far as."""

from __future__ import annotations

import pytest

from firstlight.base.phases import DEVICE, DRAFTER, KV, PLACES, PREPARE, RENDEZVOUS
from firstlight.doctor.logs.grammar import places_of
from firstlight.launch.public.startup_status import Situation, picture
from firstlight.launch.timeline.progress import PhaseTrack, ProgressLine


def tracks(*phases: str) -> dict[str, PhaseTrack]:
    return {
        f"rank-{rank}": PhaseTrack(
            ProgressLine(time_s=2.0, name=f"rank-{rank}", rank=rank, phase=phase, start_s=1.0)
        )
        for rank, phase in enumerate(phases)
    }


@pytest.mark.parametrize(
    ("phases", "engine", "shown"),
    [
        ((DRAFTER, PREPARE), "native", "rank 0 is in phase drafter"),
        ((KV, PREPARE), "native", "rank 1 is in phase prepare"),
        ((DEVICE, RENDEZVOUS), "native", "rank 1 is in phase rendezvous"),
        ((DEVICE, RENDEZVOUS), "vllm", "rank 0 is in phase device"),
        ((KV, "of-another-version"), "native", "rank 1 is in phase of-another-version"),
    ],
)
def test_the_start_is_as_far_as_its_slowest_rank(phases: tuple[str, str], engine: str, shown: str) -> None:
    situation = Situation(status="starting", model="m", places=places_of(engine), tracks=tracks(*phases))
    assert shown in picture(situation).message
    assert places_of("native") == PLACES
