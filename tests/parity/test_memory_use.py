"""What a rank really takes in its largest step is no more than its report has planned for.

An estimate that is too low is worse than a refusal: the kernel ends the rank, and nobody learns why.
Invariant: shared pages of libraries do not count, they can be dropped.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.shipped import find
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.rank_processes import RankProcesses

UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
IMPORTED = """
from firstlight.base.imports import put_off
put_off("torch._meta_registrations", "torch.export")
import firstlight.engine.worker.rank_loop
print(open("/proc/self/status").read())
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="no /proc to read a process's memory of"
    ),
]


def status(text: str) -> dict[str, int]:
    """Bytes by name."""
    return {name: int(value) * 1024 for name, value in re.findall(r"(\w+):\s+(\d+) kB", text)}


@pytest.fixture(scope="module")
def imported() -> int:
    """What a rank has for itself when it asks how much memory is there."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    return status(done.stdout)["RssAnon"]


def planned(notes: list[str]) -> float:
    lines = [re.match(r"(weights|workspace|kv cache): ([\d.]+) (\w+) \(", note) for note in notes]
    found = {line[1]: float(line[2]) * UNITS[line[3]] for line in lines if line}
    assert len(found) == 3
    return sum(found.values())


def drafter_read(notes: list[str]) -> float:
    """The floats of a drafter and the file's 2-byte values that they are made of: both are there before the
    memory is asked for; it is kept in 8 bits."""
    line = re.search(r"of these the drafter: ([\d.]+) MB of weights", "\n".join(notes))
    return 0.0 if line is None else float(line[1]) * 10**6 / (34 / 32) * (4 + 2)


def load(report: dict[str, Any], vocab_size: int) -> list[list[Submit]]:
    """The longest prompt; and as many sequences as there may be, sampled at the greatest cost."""
    draws, length, sequences = random.Random(0), report["max_model_len"], report["max_num_seqs"]

    def prompt(num_tokens: int) -> list[int]:
        return [draws.randrange(vocab_size) for _ in range(num_tokens)]

    costly = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, logprobs=5, frequency_penalty=0.5)
    each = max(4, min(length - 16, report["kv_tokens"] // sequences - 20))
    long = [Submit("long", prompt(length - 8), SamplingParams(max_tokens=4))]
    return [long, [Submit(str(n), prompt(each), costly) for n in range(sequences)]]


def require_no_more(imported: int, model: Path, num_ranks: int, **section: Any) -> None:
    dtype = section.pop("dtype", "auto")
    with RankProcesses(model, num_ranks, dtype=dtype, **section) as ranks:
        ready = ranks.wait_until_ready()
        report: dict[str, Any] = dict(ready.report)
        for submits in load(report, ready.vocab_size):
            ranks.run(submits)
        most = imported + planned(report["memory"]) + drafter_read(report["memory"])
        for process in ranks.processes:
            found = status(Path(f"/proc/{process.pid}/status").read_text())
            assert found["VmHWM"] - found["RssFile"] <= most, report["memory"]


SMALL = {"max_num_seqs": 8, "max_batched_tokens": 64, "kv_memory_bytes": 2**25, "max_model_len": 1024}
MIDDLE = {"max_num_seqs": 32, "kv_memory_bytes": 2**27, "max_model_len": 2048}


@pytest.mark.parametrize("sizes", [SMALL, MIDDLE], ids=["small", "middle"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_default_model(real_path: Path, imported: int, num_ranks: int, sizes: dict[str, int]) -> None:
    require_no_more(imported, real_path, num_ranks, drafter="none", **sizes)


@pytest.mark.parametrize("sizes", [SMALL, MIDDLE], ids=["small", "middle"])
def test_the_default_model_with_its_drafter(real_path: Path, imported: int, sizes: dict[str, int]) -> None:
    require_no_more(imported, real_path, 1, drafter=str(find()), **sizes)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_tiny_model(tmp_path: Path, imported: int, num_ranks: int, dtype: str) -> None:
    description = tiny_description(max_position=512)
    folder = write_hf_folder(tmp_path / "tiny", description, random_weights(description))
    require_no_more(imported, folder, num_ranks, dtype=dtype, drafter="none", max_num_seqs=16)
