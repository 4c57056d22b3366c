"""The EAGLE-3 drafter in the engine: whatever came before, its slots and drafts are those of the whole text.

Drafts that are accepted come from a drafter that knows the answers, so that slots are written by verifying
steps too. Prefixes are shared, chunks cut, pages evicted and sequences preempted. Two faults of other
engines are planted, and must be seen (16 and 17 of the catalogue).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import pytest

from firstlight.drafter.chain import eagle_proposer
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.eagle3 import Eagle3TreeDrafter
from support.eagle3 import NUM, SIZES, Pair, tiny_eagle3, write_pair
from support.engines import Harness, Result, submit

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each state": {"fc_norm": True, "norm_output": True},
}
SHARED = [3 + (5 * n) % 60 for n in range(24)]  # six pages
MIXED = [
    submit("one", SHARED[:1], max_tokens=14, ignore_eos=True),
    submit("short", SHARED[:7], max_tokens=11, ignore_eos=True),
    submit("whole pages", SHARED[:8], max_tokens=12, ignore_eos=True),
    submit("long", [*SHARED, *SHARED[3:20]], max_tokens=20, ignore_eos=True),
    submit("seeded", SHARED[:9], max_tokens=12, ignore_eos=True, temperature=1.5, seed=4),
]
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=["float32", "auto"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def answers_of(folders: Folders, dtype: str, submits: list[Any]) -> dict[str, Result]:
    return Harness(folders[0], dtype=dtype, cpu_kernels="native", **SIZES).run(submits)


@pytest.fixture(scope="module")
def answers(folders: Folders, dtype: str) -> dict[str, Result]:
    return answers_of(folders, dtype, MIXED)


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_slots_and_drafts_are_those_of_the_whole_text(
    folders: Folders, dtype: str, answers: dict[str, Result], wrong: float
) -> None:
    assert Pair(*folders, dtype).run(MIXED, answers, wrong) >= 12


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kernels", ["float32", "auto"])
def test_drafts_are_those_of_the_offline_chain(tmp_path: Path, flags: str, kernels: str) -> None:
    """With rounding most of them: logits of a random drafter lie close together."""
    folders = write_pair(tmp_path, **FLAGS[flags])
    pair = Pair(*folders, kernels)
    model = tiny_eagle3(**FLAGS[flags])
    model.look_up = pair.embedding
    text, same = [*SHARED, *SHARED], 0
    for length in range(2, len(text)):
        sequence = pair.whole(text[:length], SamplingParams(temperature=0.0, seed=0))
        expected = eagle_proposer(model, pair.states, text[1:length])(length - 2, NUM)
        same += pair.other.propose([sequence], NUM)[0] == expected
    assert same == len(text) - 2 if kernels == "float32" else same > 0.6 * len(text)


def test_chunks_of_a_prompt(folders: Folders, dtype: str, answers: dict[str, Result]) -> None:
    pair = Pair(*folders, dtype, max_batched_tokens=5, max_num_seqs=3)
    assert pair.run(MIXED, answers) >= 12


def test_two_continuations_of_a_cached_prefix_that_differ_behind_a_page_s_end(
    folders: Folders, dtype: str
) -> None:
    """What a full page holds of its last token does not depend on the token after it."""
    pair = Pair(*folders, dtype)
    first = [submit("first", [*SHARED[:16], 70, 71], max_tokens=8, ignore_eos=True)]
    pair.run(first, answers_of(folders, dtype, first))
    others = [
        submit(f"{token}", [*SHARED[:16], token, token + 1], max_tokens=8, ignore_eos=True)
        for token in (70, 72, 80)
    ]
    assert pair.run(others, answers_of(folders, dtype, others)) >= 6
    assert pair.num_cached == 3 * 16


def test_pages_written_while_nothing_was_drafted(
    folders: Folders, dtype: str, answers: dict[str, Result]
) -> None:
    pair = Pair(*folders, dtype)
    pair.engine.draft_with(pair.drafter, 0)
    pair.engine.run(MIXED)
    assert pair.run(MIXED, answers) >= 12
    assert pair.num_cached > 40


def test_preempted_and_evicted(folders: Folders, dtype: str) -> None:
    many = [submit(f"{n}", [n + 3, *SHARED[: 4 + 2 * n]], max_tokens=30, ignore_eos=True) for n in range(6)]
    page_bytes = 4 * 2 * 2 * 16 * 4 * (4 if dtype == "float32" else 2)
    draft_bytes = 4 * (64 * 4 + 2 * 2 * 16 * (4 if dtype == "float32" else 2))
    pair = Pair(*folders, dtype, kv_memory_bytes=34 * (page_bytes + draft_bytes))
    assert pair.engine.started.num_pages == 35
    assert pair.run([*many, *MIXED], answers_of(folders, dtype, [*many, *MIXED])) > 50
    assert pair.engine.core.scheduler.stats().num_preemptions > 2


class WithoutDraftedRows:
    """Fault 16: slots of drafts keep what was there, also when the drafts are accepted."""

    def __init__(self, drafter: Eagle3TreeDrafter) -> None:
        self._drafter, self.layers, self.name, self.is_model = drafter, drafter.layers, "planted", True

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        if not any(sequence.drafts for sequence in sequences):
            self._drafter.observe(plan, sequences)

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        raise AssertionError("only told of steps")


def test_a_drafter_that_keeps_what_drafts_left_is_found(
    folders: Folders, dtype: str, answers: dict[str, Result]
) -> None:
    with pytest.raises(AssertionError, match=" of "):
        Pair(*folders, dtype).run(MIXED, answers, 0.0, WithoutDraftedRows)


def test_a_drafter_that_does_not_see_pages_while_it_rests_is_found(
    folders: Folders, dtype: str, answers: dict[str, Result]
) -> None:
    """Fault 17: pages from the prefix cache that have no keys of the drafter."""
    pair = Pair(*folders, dtype)
    pair.engine.core.speculation = None
    pair.engine.run(MIXED)
    with pytest.raises(AssertionError, match=" of "):
        pair.run(MIXED, answers)


def test_a_seed_drafts_with_the_noise_that_the_target_draws_with(folders: Folders, dtype: str) -> None:
    """At a high temperature noise decides: drafter and target then agree, whatever their logits, more often
    than one in as many tokens as the drafter has."""
    pair = Pair(*folders, dtype)
    hot = [
        submit(str(n), SHARED[:9], max_tokens=20, temperature=4.0, seed=n, ignore_eos=True) for n in range(8)
    ]
    answers = answers_of(folders, dtype, hot)
    pair.engine.draft_with(pair.drafter, NUM)
    results = pair.engine.run(hot)
    assert all(results[name].tokens == answers[name].tokens for name in answers)
    assert sum(result.num_accepted for result in results.values()) > 15


def test_the_report_says_what_was_read_and_what_it_takes(folders: Folders, dtype: str) -> None:
    report = Harness(
        folders[0], dtype=dtype, cpu_kernels="native", drafter=str(folders[1]), **SIZES
    ).started.report
    assert report["drafter"] == "eagle3: as many as pay, at most 3 drafts, keyed verification"
    assert any("blocks that have run" in note for note in report["drafter_notes"])
    assert any(line.startswith("of these the drafter: ") for line in report["memory"])
