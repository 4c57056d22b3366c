"""The stall for which this project was begun, as it was seen that day: what the doctor may say of it."""

from __future__ import annotations

import msgspec
import pytest

from firstlight.doctor.case.bundle import read_bundle, write_bundle
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import HOST, RUN, Engine, Role, TargetProcess
from firstlight.doctor.case.values_host import Gpu, Gpus, HostMemory, HttpProbe
from firstlight.doctor.case.values_process import Listed, LogTail, ProcessState
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Condition, Grade, Look
from firstlight.doctor.verdict import UNKNOWN, judge
from support.doctor_scenes import case, made_up, target

GB = 10**9
BAR = "Loading safetensors checkpoint shards: 100% Completed | 64/64 [00:22<00:00,  2.85it/s]"
COMMAND = ("python", "-m", "sglang.launch_server", "--model-path", "/models/kimi", "--tp", "8")
LINES = (
    "server_args=ServerArgs(model_path='/models/kimi', tp_size=8, speculative_algorithm=None, port=30000)",
    "[2026-01-10 10:00:01 TP0] Init torch distributed begin.",
    "[2026-01-10 10:00:09 TP0] Load weight begin. avail mem=78.90 GB",
    BAR,
    BAR,
)


def of_that_day() -> Case:
    """`ps … | head -5`, `free`, `nvidia-smi`, `curl`, and the tail of the log; each looked at once."""
    launcher = made_up("launcher", 100, Role.LAUNCHER)
    launcher = msgspec.structs.replace(launcher, command=COMMAND)
    ranks = [made_up(f"rank-{rank}", 200 + rank, rank=rank) for rank in range(4)]
    listed: list[TargetProcess] = [launcher, *ranks]
    found = target(
        *listed,
        engine=Engine.SGLANG,
        expected_ranks=8,
        expected_from="command line: tensor parallel 8",
        model="/models/kimi",
        addresses=(("127.0.0.1", 30000),),
        is_complete=False,
    )
    gpus = tuple(
        Gpu(
            index=i, name="H100", utilization_percent=0, memory_used_bytes=70 * GB, memory_total_bytes=80 * GB
        )
        for i in range(8)
    )
    url = "http://127.0.0.1:30000/health"
    memory = HostMemory(
        total_bytes=449 * GB, available_bytes=410 * GB, page_cache_bytes=416 * GB, shared_bytes=0
    )
    log = LogTail(path="sglang.log", size_bytes=9000, modified_wall_s=400.0, lines=LINES)
    return case(
        found,
        [
            *((0, process.key, ProcessState(state="S")) for process in listed),
            *((0, p.key, Listed(lifetime_cpu_percent=0.0, virtual_bytes=425 * GB)) for p in listed),
            (0, RUN, log),
            (0, HOST, Gpus(gpus=gpus, driver="550.54")),
            (0, HOST, memory),
            (0, RUN, HttpProbe(url=url, address="127.0.0.1", outcome="refused")),
        ],
    )


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    path = tmp_path_factory.mktemp("bundle") / "founding.bundle"
    write_bundle(path, [of_that_day()])
    (found,) = read_bundle(path)
    return judge(found)


def everything_said(verdict: Verdict) -> str:
    clues = [clue.text for clue in (*verdict.supports, *verdict.contradicts)]
    others = [(other.summary, *(clue.text for clue in other.supports)) for other in verdict.others]
    return "\n".join((verdict.summary, *clues, *(text for other in others for text in other)))


def test_the_cause_is_unknown_and_ranked(verdict: Verdict) -> None:
    assert (verdict.condition, verdict.cause) == (Condition.UNCLEAR, UNKNOWN)
    causes = [other.cause for other in verdict.others]
    assert {other.grade for other in verdict.others} <= {Grade.POSSIBLE, Grade.SUSPECTED}
    for likely in ("rank-died", "slow-weights", "fusion-rendezvous", "stale-jit-lock", "collective-desync"):
        assert likely in causes, causes


def test_three_looks_would_decide(verdict: Verdict) -> None:
    assert set(verdict.decisive) == {Look.RANKS, Look.BYTES, Look.STACKS}


def test_what_is_excluded(verdict: Verdict) -> None:
    excluded = {item.cause for item in verdict.excluded}
    assert "drafter-mismatch" in excluded  # speculative_algorithm=None
    assert excluded >= {"p2p-broken", "graph-replay-hang", "kernel-livelock"}  # a GPU would stand at 100 %
    assert not excluded & {other.cause for other in verdict.others}
    assert all(clue.evidence for item in verdict.excluded for clue in item.because)


def test_no_rank_is_called_missing(verdict: Verdict) -> None:
    said = everything_said(verdict)
    assert "8" not in verdict.summary
    assert "of 8 ranks are alive" not in said
    assert "of 8 ranks exist" not in said
    assert any("was cut" in caution and "4 of 8" in caution for caution in verdict.cautions)


def test_traps_are_named(verdict: Verdict) -> None:
    text = "\n".join(verdict.cautions)
    for trap in ("%CPU", "VIRT", "counts shards", "one bar", "Page cache"):
        assert trap in text, trap
    said = everything_said(verdict)
    assert "425" not in said
    assert "0.0" not in said
