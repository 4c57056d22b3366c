"""Faults of an engine, planted one by one: the explanation gets the checkpoint, the engine and the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from firstlight.drafter.explain.finding import Side
from support import fault_plants as plants
from support.explaining import causes, explain
from support.fault_runs import FaultRun

pytestmark = pytest.mark.slow
Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[Plant, str]] = {
    "10 residual": (plants.residual_lost, "the residual around the drafter's attention is lost"),
    "11 flag": (plants.flag_ignored, "norm_before_residual is taken the wrong way"),
    "15 fc": (plants.fc_skipped, "fc is left out (the drafter runs as EAGLE, not as EAGLE-3)"),
    "16 keys": (
        plants.drafted_keys_kept,
        "draft keys are not made anew from the target's states after verification",
    ),
    "17 prefix": (plants.prefix_without_keys, "draft keys of cached prefixes are missing"),
    "3 last block": (plants.last_block_not_captured, "the last state is of another block"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_the_engine_is_named(sound: FaultRun, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, cause = PLANTED[name]
    plant(monkeypatch)
    verdict = explain(sound)
    assert (verdict.side, verdict.cause) == (Side.INTEGRATION, cause), causes(verdict)


def test_an_overwritten_head_is_named(sound: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 12, by the tensors that the engine holds: what it drafts with them may be nearly as good."""
    plants.head_overwritten(sound, monkeypatch)
    verdict = explain(sound)
    assert verdict.side is Side.INTEGRATION
    assert verdict.cause == "lm_head.weight was overwritten after loading"
    assert "and equals the target's" in verdict.findings[0].evidence[0]


def test_partial_sums_of_ranks_are_named(sound: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 7: only two ranks show it."""
    plants.partial_sums(monkeypatch)
    assert explain(sound).side is Side.FINE
    verdict = explain(sound, num_ranks=2)
    assert (verdict.side, verdict.cause) == (
        Side.INTEGRATION,
        "per-rank partial sums are captured",
    ), causes(verdict)
