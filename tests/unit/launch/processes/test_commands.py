"""What is started, with which threads and cores."""

from __future__ import annotations

from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection
from firstlight.launch.janitor import RUN_VARIABLE
from firstlight.launch.processes.commands import child_specs, core_shares


def config(ranks: int, threads: int) -> RunConfig:
    return RunConfig(
        run_dir="/run/x",
        model=ModelSection(path="m", served_names=("m",)),
        engine=EngineSection(tensor_parallel=ranks, threads=threads),
        server=ServerSection(),
    )


def test_one_rank_uses_all_cores_and_is_not_bound() -> None:
    rank, api = child_specs(config(1, 2), 7, 8, [0, 1])
    assert rank.command[-5:] == ("firstlight.engine.rank", "--run-dir", "/run/x", "--rank", "0")
    assert (rank.name, rank.variables["OMP_NUM_THREADS"], rank.cores, rank.pass_fds) == (
        "rank-0",
        "2",
        None,
        (),
    )
    descriptors = ("--fd", "7", "--control-fd", "8")
    assert api.command[-7:] == ("firstlight.serve.api", "--run-dir", "/run/x", *descriptors)
    assert (api.name, api.variables["OMP_NUM_THREADS"], api.pass_fds) == ("api", "1", (7, 8))
    assert {spec.variables[RUN_VARIABLE] for spec in (rank, api)} == {"x"}


def test_several_ranks_get_disjoint_neighbouring_cores() -> None:
    assert core_shares([5, 1, 0, 4], 2) == [frozenset({0, 1}), frozenset({4, 5})]
    assert core_shares([0, 1, 2], 2) == [frozenset({0}), frozenset({1})]


def test_more_ranks_than_cores_are_left_to_the_kernel() -> None:
    assert core_shares([0], 2) == [None, None]


def test_no_child_imports_from_the_folder_it_was_started_in() -> None:
    assert all("-P" in spec.command for spec in child_specs(config(2, 1), 7, 8, [0, 1]))
