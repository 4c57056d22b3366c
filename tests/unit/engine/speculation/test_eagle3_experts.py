"""EAGLE-3 over a target with experts and latent attention, with drafters of both kinds of attention.

As `test_eagle3`: whatever came before, slots and drafts are those of the whole text, and drafts change no
token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.models.eagle3_file import save_eagle3
from support.drafters import LATENT
from support.eagle3 import LENGTH, SIZES, VOCABULARY, Pair, tiny_eagle3
from support.engines import Harness, submit
from support.experts import kimi, write_experts

TARGET = kimi(num_layers=4, vocab_size=VOCABULARY, max_position=LENGTH)
SHARED = [3 + (5 * n) % 60 for n in range(20)]
WORKLOAD = [
    submit("one", SHARED[:1], max_tokens=12, ignore_eos=True),
    submit("long", [*SHARED, *SHARED[3:15]], max_tokens=16, ignore_eos=True),
    submit("seeded", SHARED[:9], max_tokens=12, ignore_eos=True, temperature=1.5, seed=4),
]
DRAFTERS: dict[str, dict[str, Any]] = {"grouped queries": {}, "latent": LATENT}
Folders = tuple[Path, Path]


@pytest.fixture(scope="module", params=DRAFTERS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("pair")
    target = write_experts(folder / "target", TARGET)
    (folder / "drafter").mkdir()
    save_eagle3(folder / "drafter", tiny_eagle3(**DRAFTERS[request.param]), torch.float32)
    return target, folder / "drafter"


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_slots_and_drafts_are_those_of_the_whole_text(folders: Folders, dtype: str) -> None:
    answers = Harness(folders[0], dtype=dtype, cpu_kernels="native", **SIZES).run(WORKLOAD)
    assert Pair(*folders, dtype).run(WORKLOAD, answers, wrong=0.4) >= 8


def test_a_drafter_of_either_kind_changes_no_bit(folders: Folders) -> None:
    alone = Harness(folders[0], **SIZES).run(WORKLOAD)
    drafting = Harness(folders[0], drafter=str(folders[1]), draft_tokens=3, draft_adapt=False, **SIZES)
    results = drafting.run(WORKLOAD)
    assert [name for name in alone if not results[name].same_bits(alone[name])] == []
    assert drafting.core.speculation is not None
    assert sum(drafting.core.speculation.counts.drafted) > 20
