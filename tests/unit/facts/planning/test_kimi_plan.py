"""Kimi-K2.5 on eight GPUs, from its headers alone: figures that were worked out by hand are reproduced."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from firstlight.facts.planning.all_reduce import LINKS, AllReduceTimes, measured, modelled
from firstlight.facts.planning.decode_time import DecodeTimes, Rates
from firstlight.facts.planning.deployment import Plan, make_plan
from firstlight.facts.planning.outline import open_outline, read_built_in
from firstlight.facts.planning.rank_memory import Device, Load
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    ROUTER,
    SHARED_EXPERTS,
    Ranks,
    share_of,
)
from shape.source import REPOSITORY

RATES = Rates(1.8e12, 30e-6)
RING = modelled("ring", LINKS["pcie"], 8)
OUTLINE = open_outline("kimi-k2.5")


def device(**changes: Any) -> Device:
    fields: dict[str, Any] = {"memory_bytes": 96 * 2**30, "fraction": 0.85, "rates": RATES}
    return Device(**{**fields, "storage_bytes_per_s": 12e9, **changes})


def planned(reduce: AllReduceTimes = RING, ranks: Ranks | None = None, **load: Any) -> Plan:
    return make_plan(OUTLINE, ranks or Ranks(8), device(), Load(**load), reduce)


def test_the_description_is_the_one_that_its_script_makes() -> None:
    script = runpy.run_path(str(REPOSITORY / "benchmarks" / "describe_headers.py"))
    path = REPOSITORY / "src" / "firstlight" / "facts" / "built_in" / "kimi-k2.5.json"
    assert path.read_text() == script["text_of"](script["KIMI"])


def test_tensors_and_bytes_of_the_files() -> None:
    plan = planned()
    by_kind = {kind.kind: kind for kind in plan.weights}
    assert by_kind[EXPERTS].num_tensors == 207_360 == 60 * 384 * 3 * 3
    gigabytes = {name: round(kind.total_bytes / 1e9, 1) for name, kind in by_kind.items()}
    expected = {EXPERTS: 570.8, ATTENTION: 12.3, SHARED_EXPERTS: 5.3, DENSE: 0.8}
    assert {name: gigabytes[name] for name in expected} == expected
    assert round((by_kind[EMBEDDING].total_bytes + by_kind[HEAD].total_bytes) / 1e9, 1) == 4.7
    assert round(plan.total_bytes / 1e9) == 594
    assert plan.num_files == 64
    rows = read_built_in("kimi-k2.5").headers
    everything = sum(row.num * row.nbytes for row in rows)
    assert round(everything / 2**30) == 554  # with the parts for images, which are skipped
    assert "335 tensors (942.3 MB) are no part of the language model" in plan.notes[1]


def test_slices_of_experts() -> None:
    groups = {group.name.rpartition("experts.#.")[2]: group for group in OUTLINE.groups}

    def share(name: str) -> tuple[int, int]:
        found = share_of(groups[name], OUTLINE.description, Ranks(8), 3)
        return found.num_pieces, found.piece_bytes

    assert groups["gate_proj.weight_packed"].nbytes == 7_340_032
    assert share("gate_proj.weight_packed") == (1, 917_504)
    assert share("down_proj.weight_packed") == (7168, 128)
    assert share("down_proj.weight_scale") == (7168, 16)
    assert share("down_proj.weight_shape") == (1, 8)


def test_amplification_of_the_loaders() -> None:
    ways = {way.name: way for way in planned().loaders}
    experts = [round(way.experts_amplification or 0.0, 1) for way in ways.values()]
    assert experts == [8.0, 3.3, 3.3, 1.0, 1.0]
    assert [round(way.amplification, 1) for way in ways.values()] == [8.0, 3.3, 3.4, 1.2, 1.0]
    assert ways["each byte once per host"].nbytes == OUTLINE.total_bytes


def test_work_of_a_loader_that_goes_tensor_by_tensor() -> None:
    work = planned().load_work
    assert round(work.views_s) == 3
    assert [round(seconds) for seconds in work.name_search_s] == [12, 35]
    assert round(work.transposes_s / 60, 1) == 4.3  # 69,120 matrices of 3.6 to 3.9 ms
    # 547 GB have 133 million pages and 8.3 million windows of fault-around; this has all weights.
    assert work.minor_faults / OUTLINE.total_bytes == pytest.approx(133e6 / 547e9, rel=0.01)
    assert work.minor_faults_around / OUTLINE.total_bytes == pytest.approx(8.3e6 / 547e9, rel=0.01)


def test_bytes_of_a_token_and_of_several() -> None:
    plan = planned(max_drafts=7)
    without_router = plan.token_bytes - plan.token_bytes_by_kind[ROUTER]
    # By hand the routers' 0.33 GB and the norms were left out, and the rest was rounded down.
    assert without_router / 1e9 == pytest.approx(32.6, abs=0.06)
    assert without_router / 8e9 == pytest.approx(4.08, abs=0.005)
    assert plan.growth == pytest.approx([1, 1.36, 1.71, 2.05, 2.38, 2.70, 3.03, 3.35], abs=0.03)
    # What latent attention shares out to no one makes a rank read more than an eighth.
    assert plan.steps[0].weight_bytes / 1e9 == pytest.approx(6.03, abs=0.01)


def test_memory_of_a_rank() -> None:
    plan = planned()
    assert plan.kv_token_bytes == 61 * (512 + 64) * 2
    assert plan.rank_bytes / 1e9 == pytest.approx(78.24, abs=0.01)
    split = planned(ranks=Ranks(8, splits_embedding=True))
    assert plan.rank_bytes - split.rank_bytes == 163_840 * 7168 * 2 * 7 // 8
    whole = planned(ranks=Ranks(8, expert_parallel=True))
    assert whole.rank_bytes == plan.rank_bytes - 69_120 * 8 * 7 // 8  # shapes of other ranks' experts
    assert sum(line.nbytes for line in plan.memory) == int(0.85 * 96 * 2**30)
    assert plan.kv_tokens == 91_056


def test_all_reduces() -> None:
    plan = planned()
    assert (plan.num_all_reduces, plan.message_bytes) == (122, 14_336)
    # NCCL's own latencies of its LL protocol, with 2, 4 and 8 ranks over PCIe.
    latencies = [modelled("ring", LINKS["pcie"], ranks).alpha_s for ranks in (2, 4, 8)]
    assert latencies == pytest.approx([8.6e-6, 12.6e-6, 20.6e-6])


def test_the_step_of_the_founding_story() -> None:
    plan = planned(measured([(14_336, 46.9e-6)], RING))
    step = plan.steps[0]
    assert step.total_s == pytest.approx(11.1e-3, rel=0.01)
    assert step.all_reduce_share == pytest.approx(0.515, abs=0.01)
    assert step.most_tokens_per_s == pytest.approx(90, abs=1)
    assert 0.515 * 11.1e-3 / plan.num_all_reduces == pytest.approx(
        46.9e-6, rel=0.01
    )  # docs/plan.md derives it so
    weights = RankWeights(OUTLINE, Ranks(8))
    times = DecodeTimes(weights, RATES, measured([(14_336, 46.9e-6)], RING), plan.kv_token_bytes)
    evenly_s = (plan.token_bytes - plan.token_bytes_by_kind[ROUTER]) / 8 / RATES.memory_bytes_per_s
    assert evenly_s == pytest.approx(2.3e-3, abs=0.05e-3)
    assert times.step(1).weights_s == pytest.approx(3.35e-3, abs=0.01e-3)  # and what is on every rank


def test_the_cliff_at_64_kb() -> None:
    cliff = measured([(4096, 45e-6), (65_536, 344e-6)], RING)
    assert 122 * cliff.of(65_536) == pytest.approx(42e-3, rel=0.01)
    plan = planned(cliff)
    four_tokens = plan.drafts[2]
    assert 0.3 <= (1 + 3 * 0.15) / four_tokens.round_cost <= 0.7
