"""What planning says of the embedded model, beside a real start of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firstlight.base.config import EngineSection
from firstlight.engine.worker.startup import quiet, start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.planning.memory_budget import kv_bytes_per_token, kv_row_bytes
from firstlight.facts.planning.outline import open_outline
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import Ranks
from firstlight.loading.plan import make_plan
from firstlight.models.declare import Declaration
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.reference import ReferenceBackend

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def told(lines: list[str], name: str) -> float:
    """Bytes that a line of the start-up report tells, rounded as it is."""
    line = next(line for line in lines if line.startswith(f"{name}: "))
    match = re.match(rf"{name}: ([0-9.]+) (\w+)", line)
    assert match is not None
    return float(match[1]) * UNITS[match[2]]


def test_a_start_reads_and_keeps_what_was_planned(real_path: Path) -> None:
    outline = open_outline(str(real_path))
    weights = RankWeights(outline, Ranks(1))
    section = EngineSection(threads=1, max_model_len=256, max_num_seqs=8, kv_dtype="float16")
    report = start(open_checkpoint(real_path), "auto", section, Group(), quiet).report
    rows = next(way for way in weights.loaders(1e9) if way.name.startswith("whole rows"))
    # What is read has the gaps between tensors too.
    assert rows.nbytes <= report["weights_read_bytes"] <= 1.01 * rows.nbytes
    assert sum(report["formats"].values()) == outline.total_bytes
    description = outline.description
    token_bytes = kv_bytes_per_token(description, kv_row_bytes(description, "float16"))
    assert told(report["memory"], "kv cache") == pytest.approx(token_bytes * report["kv_tokens"], rel=0.001)
    # A start counts the embedding as a table of 16 bits beside the head's layout; layouts may be larger than
    # the file's, and there may be two.
    table = 2 * description.vocab_size * description.hidden_size
    assert 0.99 * outline.total_bytes <= told(report["memory"], "weights") <= 3 * outline.total_bytes + table


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_keep_what_was_planned(real_path: Path, num_ranks: int) -> None:
    checkpoint = open_checkpoint(real_path)
    weights = RankWeights(open_outline(str(real_path)), Ranks(num_ranks))
    for rank in range(num_ranks):
        declare = Declaration(ReferenceBackend("only names are asked for"), Group(rank, num_ranks))
        find("llama")(declare, checkpoint.description)
        assert make_plan(checkpoint, declare.wanted).resident_bytes == weights.rank_bytes(rank)
