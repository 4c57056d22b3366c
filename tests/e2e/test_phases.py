"""The order of the phases is that of real starts: of one and two ranks, with a drafter and without."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from firstlight.base.phases import (
    BUILD,
    DEVICE,
    DRAFTER,
    IMPORTS,
    KV,
    PHASES,
    PREPARE,
    READY,
    RENDEZVOUS,
    SELF_TEST,
    SERVING,
    SPAWN,
    WEIGHTS,
)
from support.serving import RunningServer, write_chat_model

# Of every rank; what rank 0 has beside it: a drafter if one was asked for, and the first token.
ALL_HAVE = (SPAWN, IMPORTS, RENDEZVOUS, DEVICE, BUILD, PREPARE, WEIGHTS, KV, READY, SERVING)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_real_start_goes_through_the_phases_in_their_order(
    model: Path, num_ranks: int, drafter: str
) -> None:
    flags = ("--tensor-parallel", str(num_ranks), "--drafter", drafter)
    with RunningServer(model, *flags) as server:
        run_dir = next(
            words[words.index("--run-dir") + 1]
            for child in psutil.Process(server.pid).children()
            if "--rank" in (words := child.cmdline())
        )
        command = [sys.executable, "-m", "firstlight", "blackbox", run_dir, "--json"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    entries = [entry for entry in json.loads(shown)["entries"] if "phase" in entry]
    for rank in range(num_ranks):
        entered = [entry["phase"] for entry in entries if entry["process"] == f"rank-{rank}"]
        alone = {SELF_TEST, *([DRAFTER] if drafter != "none" else [])} if rank == 0 else set()
        expected = [phase for phase in PHASES if phase in {*ALL_HAVE, *alone}]
        assert [phase for phase, _ in groupby(entered)] == expected
