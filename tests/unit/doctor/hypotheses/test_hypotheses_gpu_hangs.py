"""Silent hangs of servers on GPUs: each cause is the verdict where its evidence is, and excluded by its
veto."""

from __future__ import annotations

import pytest

from firstlight.doctor.case.target import HOST, Engine
from firstlight.doctor.case.values_device import PciGpu, PciPaths
from firstlight.doctor.case.values_host import Compiler, Compilers, Generation
from firstlight.doctor.case.values_process import Libraries, Library
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Condition, Grade
from firstlight.doctor.verdict import judge
from support.gpu_scenes import COMPUTING, IDLE, WAITING, gpus, ras, server, stack

READY = "(Worker_TP0 pid=100) INFO 11-29 21:05:10 [pynccl.py:70] vLLM is using nccl==2.27.5"
COMPLETE = "host:100:100 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 2 - Init COMPLETE"
CHANNEL = "host:100:100 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
WEIGHTS = "Loading safetensors checkpoint shards: 100% Completed | 96/96 [01:40<00:00, 1.05s/it]"
CAPTURE = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/35 [00:00<?, ?it/s]"
CAPTURED = "INFO 11-29 21:07:00 [gpu_model_runner.py:3000] Graph capturing finished in 12 secs, took 0.61 GiB"
ZERO = "[2026-11-29 21:05:10 TP0] Registering 0 cuda graph addresses"
TUNE = "[2026-11-29 21:05:10 TP0] Running FlashInfer autotune..."
DEEP = "[2026-11-29 21:05:10 TP0] Entering DeepGEMM JIT Pre-Compile session. It may take a long time"

WAITS = gpus(WAITING, WAITING)
STILL = gpus(IDLE, IDLE)
WORKS = gpus(COMPUTING, COMPUTING)
ACS = PciPaths(
    kernel_options=("intel_iommu=on",),
    num_iommu_groups=40,
    gpus=(PciGpu(address="0000:01:00.0", iommu="DMA"), PciGpu(address="0000:02:00.0", iommu="DMA")),
    redirecting=("0000:00:01.0", "0000:00:02.0"),
)
PCIE = [(0, HOST, ACS)]
SYNC = stack("torch/cuda/streams.py:synchronize", "vllm/v1/worker/gpu_model_runner.py:execute_model")
REPLAY = stack("torch/cuda/graphs.py:replay", "vllm/compilation/cuda_graph.py:__call__")
IN_CAPTURE = stack("torch/cuda/graphs.py:capture_end", "vllm/v1/worker/gpu_model_runner.py:capture_model")
CUSTOM = stack("vllm/distributed/device_communicators/custom_all_reduce.py:all_reduce")
SYMMETRIC = stack(
    "torch/distributed/_symmetric_memory/__init__.py:rendezvous",
    "flashinfer/comm/trtllm_ar.py:create_allreduce_fusion_workspace",
)
WINDOW = stack("sglang/srt/distributed/device_communicators/pynccl.py:register_comm_window")
COMM_INIT = stack("vllm/distributed/device_communicators/pynccl.py:__init__")
LOAD = stack("triton/compiler/compiler.py:_init_handles", "triton/runtime/jit.py:run")
TUNER = stack(
    "flashinfer/autotuner.py:choose_one", "vllm/model_executor/warmup/kernel_warmup.py:flashinfer_autotune"
)
BATON = stack("torch/utils/file_baton.py:wait", "torch/utils/cpp_extension.py:load")
PATCHED = gpus(IDLE, IDLE, name="NVIDIA GeForce RTX 4090", bar1_total_bytes=256 << 20, p2p={1: "ok"})
NO_TOKEN = [(1, "run", Generation(url="u", has_token=False, status=None, seconds=10.0))]
PTXJIT = [
    (0, f"rank-{rank}", Libraries(libraries=(Library(name="libnvidia-ptxjitcompiler.so.570.1", path="/l"),)))
    for rank in (0, 1)
]
COMPILES = [(1, "run", Compilers(running=(Compiler(pid=9, name="cicc", cpu_s=3.0, parent="rank-0"),)))]
SGLANG = Engine.SGLANG

FIRST = {
    "p2p-broken": {"spins": True, "log": (READY, CHANNEL, COMPLETE), "seen": [*WAITS, *PCIE]},
    "bar1-too-small": {"stacks": COMM_INIT, "seen": PATCHED, "log": (READY,)},
    "custom-all-reduce": {"spins": True, "log": (READY,), "stacks": CUSTOM, "seen": WAITS},
    "fusion-rendezvous": {"log": (READY, WEIGHTS), "stacks": SYMMETRIC, "seen": STILL},
    "fabric-manager": {"log": (READY,), "seen": gpus(IDLE, IDLE, fabric="in progress")},
    "graph-capture-hang": {"spins": True, "log": (WEIGHTS, CAPTURE), "stacks": IN_CAPTURE, "seen": WAITS},
    "graph-replay-hang": {"spins": True, "log": (CAPTURED,), "stacks": REPLAY, "seen": [*WAITS, *NO_TOKEN]},
    "lazy-module-load": {"spins": True, "log": (CAPTURED,), "stacks": LOAD, "seen": WAITS},
    "driver-ptx-jit": {"spins": True, "log": (WEIGHTS,), "seen": [*STILL, *PTXJIT]},
    "autotune": {"engine": SGLANG, "spins": True, "log": (WEIGHTS, TUNE), "stacks": TUNER, "seen": WORKS},
    "deepgemm-warmup": {"engine": SGLANG, "moves": True, "log": (WEIGHTS, DEEP), "seen": [*STILL, *COMPILES]},
    "kernel-livelock": {"spins": True, "log": (CAPTURED,), "ranks": 1, "stacks": SYNC, "seen": gpus(WAITING)},
    "collective-desync": {"spins": True, "log": (READY, WEIGHTS), "seen": [*WAITS, *ras(64, 63)]},
}
VETOED = {
    "p2p-broken": {"log": (READY, COMPLETE), "seen": [*STILL, *PCIE]},
    "bar1-too-small": {"stacks": COMM_INIT, "seen": gpus(IDLE, IDLE, bar1_total_bytes=128 << 30)},
    "custom-all-reduce": {"stacks": CUSTOM, "arguments": ("--disable-custom-all-reduce",), "seen": WAITS},
    "fusion-rendezvous": {"log": (READY, WEIGHTS), "stacks": BATON, "seen": STILL},
    "fabric-manager": {"log": (READY,), "seen": gpus(IDLE, IDLE, fabric="unsupported")},
    "graph-capture-hang": {"stacks": IN_CAPTURE, "arguments": ("--enforce-eager",), "seen": WAITS},
    "graph-replay-hang": {"log": (CAPTURED,), "stacks": REPLAY, "seen": STILL},
    "lazy-module-load": {"stacks": LOAD, "variables": {"CUDA_MODULE_LOADING": "EAGER"}, "seen": WAITS},
    "driver-ptx-jit": {"seen": [*STILL, *PTXJIT]},
    "autotune": {"engine": SGLANG, "log": (WEIGHTS, TUNE), "stacks": TUNER, "seen": STILL},
    "deepgemm-warmup": {"engine": SGLANG, "log": (DEEP,), "variables": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}},
    "kernel-livelock": {"spins": True, "stacks": SYNC, "seen": [*WAITS, *ras(64, 63)]},
}
ON_ONE_RANK = ("p2p-broken", "bar1-too-small", "custom-all-reduce", "fusion-rendezvous", "collective-desync")


def verdict(**scene: object) -> Verdict:
    return judge(server(**scene))  # type: ignore[arg-type]


def causes(found: Verdict) -> list[str]:
    return [found.cause, *(other.cause for other in found.others)]


@pytest.mark.parametrize("cause", FIRST)
def test_the_cause_is_the_verdict(cause: str) -> None:
    found = verdict(**FIRST[cause])
    assert (found.cause, found.grade) in ((cause, Grade.SUPPORTED), (cause, Grade.SUSPECTED)), causes(found)
    known = {evidence.id for evidence in server(**FIRST[cause]).evidence}  # type: ignore[arg-type]
    assert all(set(clue.evidence) <= known for clue in found.supports)
    assert found.remedy


@pytest.mark.parametrize("cause", VETOED)
def test_its_veto_excludes_it(cause: str) -> None:
    found = verdict(**VETOED[cause])
    assert cause not in causes(found)
    assert cause in [one.cause for one in found.excluded]


@pytest.mark.parametrize("cause", ON_ONE_RANK)
def test_one_rank_waits_for_nobody(cause: str) -> None:
    found = verdict(ranks=1, spins=True, log=(READY, COMPLETE), stacks=CUSTOM, seen=gpus(WAITING))
    assert cause not in causes(found)


def test_the_pattern_alone_names_nothing() -> None:
    found = verdict(spins=True, log=(WEIGHTS, CAPTURED), seen=[*WAITS, *NO_TOKEN])
    assert found.cause in ("unknown", "graph-replay-hang")
    assert found.grade is Grade.SUSPECTED
    assert {"p2p-broken", "kernel-livelock"} <= set(causes(verdict(spins=True, log=("starts",), seen=WAITS)))
    assert verdict(spins=True, log=("starts",), seen=WAITS).cause == "unknown"


def test_unequal_counts_are_a_desync_and_no_kernel() -> None:
    found = verdict(spins=True, log=(READY, COMPLETE), stacks=SYNC, seen=[*WAITS, *PCIE, *ras(64, 63)])
    assert found.cause == "collective-desync"
    assert "kernel-livelock" in [one.cause for one in found.excluded]


def test_the_rank_whose_gpu_stands_still_is_the_one_that_did_not_come() -> None:
    found = verdict(ranks=4, spins=True, log=(WEIGHTS,), seen=gpus(WAITING, WAITING, IDLE, WAITING))
    assert (found.cause, found.subject) == ("collective-desync", "rank-2")
    assert "rank-2 has launched no kernel" in found.summary


def test_equal_counts_and_a_host_that_waits_for_a_kernel() -> None:
    found = verdict(spins=True, log=(WEIGHTS, CAPTURED), stacks=SYNC, seen=[*WAITS, *ras()])
    assert found.cause == "kernel-livelock"


def test_a_replay_in_the_stack_beats_the_kernel() -> None:
    found = verdict(spins=True, log=(CAPTURED,), stacks=REPLAY, seen=[*WAITS, *ras(), *NO_TOKEN])
    assert found.cause == "graph-replay-hang"


def test_the_first_data_after_nccl_beats_the_kernel() -> None:
    found = verdict(spins=True, log=(READY, COMPLETE), stacks=SYNC, seen=[*WAITS, *PCIE, *ras()])
    assert found.cause == "p2p-broken"


def test_a_lock_file_is_no_rendezvous() -> None:
    found = verdict(log=(READY, WEIGHTS), stacks=BATON, seen=STILL)
    assert "fusion-rendezvous" in [one.cause for one in found.excluded]
    assert found.cause != "fusion-rendezvous"


def test_what_holds_the_rank_that_is_not_at_the_rendezvous_is_nearer_to_the_root() -> None:
    stacks = {0: SYMMETRIC, 1: SYMMETRIC, 2: BATON, 3: SYMMETRIC}
    found = verdict(ranks=4, log=(READY, WEIGHTS), stacks=stacks, seen=gpus(*[IDLE] * 4))
    assert (found.cause, found.subject) == ("stale-jit-lock", "rank-2")


def test_a_window_is_registered_in_silence() -> None:
    found = verdict(
        engine=SGLANG, log=(WEIGHTS,), stacks=WINDOW, arguments=("--enable-symm-mem",), seen=STILL
    )
    assert found.cause == "fusion-rendezvous"
    assert "--enable-symm-mem" in found.remedy


def test_an_error_swallowed_in_capture() -> None:
    found = verdict(engine=SGLANG, log=(WEIGHTS, "Capture cuda graph begin.", ZERO), seen=STILL)
    assert found.cause in ("graph-capture-hang", "custom-all-reduce")


def test_ranks_that_came_apart_while_tuning_are_stuck() -> None:
    found = verdict(
        engine=SGLANG, spins=True, log=(WEIGHTS, TUNE), stacks=TUNER, seen=gpus(WAITING, COMPUTING)
    )
    assert (found.cause, found.condition) == ("autotune", Condition.STUCK)


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_the_silent_start_with_idle_gpus(engine: Engine) -> None:
    """100 % loaded, no processor time, GPUs at 0 %, no port: what is left, and what is not."""
    found = verdict(engine=engine, ranks=8, log=(READY, WEIGHTS), seen=gpus(*[IDLE] * 8))
    assert found.cause == "unknown"
    left = causes(found)
    assert {"fusion-rendezvous", "fabric-manager", "bootstrap-network"} <= set(left), left
    assert left.index("fusion-rendezvous") < left.index("bootstrap-network")
    gone = {one.cause for one in found.excluded}
    assert {"p2p-broken", "graph-replay-hang", "kernel-livelock", "drafter-mismatch"} <= gone
    assert not {"autotune", "deepgemm-warmup", "driver-ptx-jit"} & set(left)


def test_a_server_on_the_processor_has_none_of_them() -> None:
    found = verdict(engine=Engine.NATIVE, log=("weights",), arguments=("--device", "cpu"))
    mine = {*FIRST, "rdma-loss", "gpu-fell-off", "vgpu-interceptor"} - {"collective-desync"}
    assert not mine & set(causes(found))


def test_a_torch_without_cuda_uses_no_gpus() -> None:
    libraries = Libraries(libraries=(Library(name="libtorch_cpu.so", path="/l"),))
    found = verdict(log=(WEIGHTS,), seen=[(0, "rank-0", libraries)])
    assert not {"fusion-rendezvous", "fabric-manager", "bar1-too-small"} & set(causes(found))


def test_our_own_engine_has_no_graphs_and_no_fusion() -> None:
    found = verdict(engine=Engine.NATIVE, log=("weights",), seen=WAITS)
    gone = {one.cause for one in found.excluded}
    assert {"graph-capture-hang", "graph-replay-hang", "fusion-rendezvous"} <= gone
