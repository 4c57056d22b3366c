"""Causes that name themselves: each is the verdict by its words, and no advice or cascade is taken for
them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from firstlight.doctor.case.target import HOST, RUN, Engine
from firstlight.doctor.case.values_host import Gpu, Gpus
from firstlight.doctor.case.values_process import ExitRecord, LogTail
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Grade
from firstlight.doctor.verdict import judge
from support.doctor_scenes import case, made_up, target
from support.gpu_scenes import IDLE, gpus, server

ERROR = "(EngineCore pid=90) ERROR 11-29 21:05:12 [core.py:700] "
TRACE = '(Worker_TP0 pid=100)   File "/v/site-packages/sgl_kernel/norm.py", line 73, in rmsnorm'
OOM = (
    f"{ERROR}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total "
    f"capacity of "
    "95.00 GiB of which 1.20 GiB is free. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
TAKEN = (
    f"{ERROR}ValueError: Free memory on device cuda:0 (12.4/79.2 GiB) on startup is less than desired GPU "
    f"memory "
    "utilization (0.9, 71.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes."
)
NO_IMAGE = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
PTX = "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."
PTXAS = "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
NOT_READY = "RuntimeError: CUDA error: system not yet initialized"
MULTICAST = "RuntimeError: CUDASymmetricMemoryAllocator: Failed to bind NVLS multicast, error 401"
PLACEMENT = (
    "INFO 11-29 21:05:12 [ray_utils.py:233] Waiting for creating a placement group of specs for 60 seconds. "
    "specs=[{'GPU': 1.0}]."
)
DRAFT = "AttributeError: 'DeepseekV3ForCausalLM' object has no attribute 'set_embed'"
XID = "NVRM: Xid (PCI:0000:41:00): 79, pid=4711, name=python, GPU has fallen off the bus."
GLOO = "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"
NUMA = "numactl: This system does not support NUMA policy"
SPECULATES = ("--speculative-algorithm", "EAGLE3")

WORDS = [
    ("gpu-out-of-memory", OOM, ()),
    ("gpu-out-of-memory", "Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB.", ()),
    ("gpu-memory-taken", TAKEN, ()),
    ("no-kernel-image", NO_IMAGE, ()),
    (
        "no-kernel-image",
        "Capture cuda graph failed: CUDA error: no kernel image is available for execution on the device",
        (),
    ),
    ("ptx-too-new", PTX, ()),
    ("ptxas-too-old", PTXAS, ()),
    ("fabric-manager", NOT_READY, ()),
    ("fabric-manager", MULTICAST, ()),
    ("ray-placement", f"{PLACEMENT}\n{PLACEMENT}", ()),
    ("drafter-mismatch", DRAFT, SPECULATES),
    ("gpu-fell-off", XID, ()),
    ("bootstrap-network", GLOO, ()),
    ("numa-bind", NUMA, ()),
]


def verdict(*lines: str, arguments: Sequence[str] = (), engine: Engine = Engine.SGLANG) -> Verdict:
    return judge(
        server(
            engine=engine,
            log=("server starts", TRACE, *(part for line in lines for part in line.split("\n"))),
            arguments=arguments,
        )
    )


@pytest.mark.parametrize(
    ("cause", "line", "arguments"), WORDS, ids=[f"{row[0]}-{i}" for i, row in enumerate(WORDS)]
)
def test_the_words_of_a_log_support_a_cause(cause: str, line: str, arguments: Sequence[str]) -> None:
    found = verdict(line, arguments=arguments)
    assert (found.cause, found.grade) == (cause, Grade.SUPPORTED)
    assert found.remedy
    assert found.supports[0].evidence


@pytest.mark.parametrize(
    ("cause", "line", "arguments"), WORDS, ids=[f"{row[0]}-{i}" for i, row in enumerate(WORDS)]
)
def test_advice_and_cascades_are_no_causes(cause: str, line: str, arguments: Sequence[str]) -> None:
    said = line.split("\n")[0]
    for wrap in (f"This may be caused by: {said}", f"{said} See root cause above.", f"if you see '{said}'"):
        found = verdict(wrap, arguments=arguments)
        assert cause not in (
            found.cause,
            *(other.cause for other in found.others if other.grade is not Grade.POSSIBLE),
        )


@pytest.mark.parametrize(
    ("cause", "line"), [("gpu-out-of-memory", OOM), ("no-kernel-image", NO_IMAGE), ("ptx-too-new", PTX)]
)
def test_last_words_of_a_dead_rank_are_the_root_of_its_death(cause: str, line: str) -> None:
    alive, dead = made_up("rank-0", 100, rank=0), made_up("rank-1", 101, rank=1)
    record = ExitRecord(name="rank-1", code=1, message=line, was_told=False)
    found = judge(case(target(alive, dead, expected_ranks=2), [(1, "rank-1", record)]))
    assert (found.cause, found.grade, found.subject) == (cause, Grade.PROVED, "rank-1")
    assert "rank-died" in [other.cause for other in found.others]


def test_a_death_in_the_log_is_the_consequence_of_its_reason() -> None:
    record = ExitRecord(name="rank-0", code=1, was_told=False)
    tail = LogTail(
        path="/log",
        size_bytes=1,
        modified_wall_s=900,
        lines=(OOM, "Rank 0 scheduler died during initialization (exit code: 1)"),
    )
    people = target(made_up("rank-0", 100, rank=0), engine=Engine.SGLANG, expected_ranks=1)
    found = judge(case(people, [(1, "rank-0", record), (1, RUN, tail)]))
    assert found.cause == "gpu-out-of-memory"


def test_a_claim_about_kernels_names_the_place() -> None:
    found = verdict(NO_IMAGE)
    assert "rmsnorm (sgl_kernel/norm.py:73)" in found.summary
    assert "no kernel image" in found.summary


def test_the_driver_is_named_with_its_cuda() -> None:
    found = judge(server(log=(PTX,), seen=gpus(IDLE, IDLE)))
    assert "570.1 (CUDA 12.8)" in found.next_test


def test_the_architecture_that_ptxas_does_not_know_is_named() -> None:
    assert "sm_121a" in verdict(PTXAS).remedy


def test_an_error_that_was_overcome_is_not_the_verdict_of_a_server_that_moves() -> None:
    found = judge(server(log=(OOM, "retrying with less"), moves=True))
    assert found.cause == "on-its-way"


def memory(foreign: dict[int, int | None], own: int = 30 << 30, used: int | None = None) -> Gpus:
    size = used if used is not None else own + sum(value or 0 for value in foreign.values())
    gpu = Gpu(
        index=0,
        name="NVIDIA H100",
        memory_used_bytes=size,
        memory_total_bytes=80 << 30,
        process_bytes={100: own, **foreign},
    )
    return Gpus(gpus=(gpu,))


def test_memory_of_others_is_the_root_of_too_little() -> None:
    found = judge(server(ranks=1, log=(OOM,), seen=[(1, HOST, memory({4711: 40 << 30}))]))
    assert found.cause == "gpu-memory-taken"
    assert "kill 4711" in found.remedy
    assert "gpu-out-of-memory" in [other.cause for other in found.others]


def test_memory_of_no_process_is_an_orphans() -> None:
    found = judge(server(ranks=1, log=(OOM,), seen=[(1, HOST, memory({}, used=70 << 30))]))
    assert found.cause == "gpu-memory-taken"
    assert "nobody the driver knows" in found.summary


def test_memory_that_is_all_its_own_excludes_others() -> None:
    found = judge(server(ranks=1, log=(OOM,), seen=[(1, HOST, memory({}))]))
    assert found.cause == "gpu-out-of-memory"
    assert "gpu-memory-taken" in [one.cause for one in found.excluded]


def test_a_container_hides_whose_memory_it_is() -> None:
    gpu = Gpu(
        index=0,
        name="x",
        memory_used_bytes=70 << 30,
        memory_total_bytes=80 << 30,
        process_bytes={991: 70 << 30},
    )
    found = judge(server(ranks=1, log=(OOM,), seen=[(1, HOST, Gpus(gpus=(gpu,)))]))
    assert found.cause == "gpu-out-of-memory"
