"""The cards of the causes that need a GPU or a foreign log: complete, marked, and every command whole."""

from __future__ import annotations

import string

import pytest

from firstlight.doctor.hypotheses.registry import HYPOTHESES
from firstlight.doctor.hypothesis import Hypothesis

RECORDED = {
    "gpu-out-of-memory", "gpu-memory-taken", "p2p-broken", "bar1-too-small", "custom-all-reduce",
    "fusion-rendezvous", "fabric-manager", "graph-capture-hang", "graph-replay-hang", "lazy-module-load",
    "driver-ptx-jit", "no-kernel-image", "ptx-too-new", "ptxas-too-old", "autotune", "deepgemm-warmup",
    "kernel-livelock", "gpu-fell-off", "numa-bind", "ray-placement", "vgpu-interceptor",
    "rdma-loss",
}  # fmt: skip
SPINNING = {"p2p-broken", "graph-replay-hang", "autotune", "kernel-livelock"}
BY_CAUSE = {hypothesis.card.cause: hypothesis for hypothesis in HYPOTHESES}
FILLED = {"pid", "run", "model", "pids", "peer", "driver", "architecture", "algorithm", "library"}


def test_what_was_never_tried_here_is_marked() -> None:
    assert set(BY_CAUSE) >= RECORDED
    assert all(BY_CAUSE[cause].card.is_recorded for cause in RECORDED)
    assert not BY_CAUSE["bootstrap-network"].card.is_recorded


def test_idle_gpus_exclude_what_would_spin_them() -> None:
    assert {cause for cause in RECORDED if not BY_CAUSE[cause].card.for_idle_gpus} == SPINNING


@pytest.mark.parametrize("hypothesis", [BY_CAUSE[cause] for cause in sorted(RECORDED)], ids=sorted(RECORDED))
def test_a_remedy_for_each_engine(hypothesis: Hypothesis) -> None:
    card = hypothesis.card
    texts = (card.remedies.native, card.remedies.vllm, card.remedies.sglang, card.next_test)
    for text in texts:
        fields = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        assert fields <= FILLED, text
        shown = text.format_map(dict.fromkeys(fields, "x"))
        assert shown.endswith(".")
        assert shown.count("`") % 2 == 0, shown
        assert "  " not in shown
    assert card.signs
    assert card.title[0].islower() or card.title.startswith(("DeepGEMM", "Ray", "RDMA", "PTX"))
