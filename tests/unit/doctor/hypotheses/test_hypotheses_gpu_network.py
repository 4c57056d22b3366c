"""Ranks that do not reach each other, sick devices, and layers around a server: by recorded evidence.

A connection that gets no answer is tried for real: a listener whose queue is full does not answer either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from firstlight.doctor.case.target import HOST, RUN, Engine
from firstlight.doctor.case.values import Failed, Value
from firstlight.doctor.case.values_device import KernelLog, NicCounters, NicPort
from firstlight.doctor.case.values_host import SocketEnd, Sockets
from firstlight.doctor.case.values_process import (
    ExitRecord,
    Libraries,
    Library,
    ProcessState,
    Threads,
    ThreadState,
)
from firstlight.doctor.collect.process_state import STATE
from firstlight.doctor.collect.sockets import SOCKETS
from firstlight.doctor.collect.threads import THREADS
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypothesis import Condition, Grade
from firstlight.doctor.verdict import judge
from support.doctor_scenes import case, child, living, look, made_up, target
from support.gpu_scenes import IDLE, WAITING, gpus, server, stack

Rows = Sequence[tuple[int, str, Value]]
DEEP_EP = stack("deep_ep/buffer.py:sync", "sglang/srt/layers/moe/token_dispatcher/deepep.py:__init__")
STORE = stack(
    "torch/distributed/rendezvous.py:_create_c10d_store", "torch/distributed/rendezvous.py:_tcp_rendezvous"
)
FULL_QUEUE = (
    "import socket, sys\nlistener = socket.create_server(('127.0.0.1', 0), backlog=0)\nkept = []\nfor _ in "
    "range(6):\n    one = socket.socket(); one.setblocking(False)\n    "
    "one.connect_ex(listener.getsockname()); kept.append(one)\nprint('up', flush=True); sys.stdin.read()"
)


def causes(found: Verdict) -> list[str]:
    return [found.cause, *(other.cause for other in found.others)]


def ends(state: str, remote: str, *, send: int = 0) -> Rows:
    """One socket of rank 1, in both looks."""
    end = SocketEnd(
        protocol="tcp",
        inode=5,
        state=state,
        local="10.0.0.1:40000",
        remote=remote,
        send_bytes=send,
        owners=("rank-1",),
    )
    return [(i, RUN, Sockets(sockets=(end,))) for i in (0, 1)]


def test_a_connection_without_an_answer_for_real() -> None:
    with child(FULL_QUEUE, ready="up") as process:
        people = target(living(process.pid, "rank-0", rank=0), expected_ranks=1)
        found = judge(look(people, [STATE, THREADS, SOCKETS], num_looks=2))
    assert (found.cause, found.grade, found.subject) == ("bootstrap-network", Grade.SUPPORTED, "rank-0")
    assert "127.0.0.1" in found.summary
    assert "SYN_SENT in both looks" in found.supports[0].text


@pytest.mark.parametrize(
    ("seen", "is_it"),
    [
        (ends("SYN_SENT", "10.0.0.2:29500"), True),
        (ends("SYN_SENT", "108.138.1.2:443"), False),  # a hub, not a rank
        (ends("ESTABLISHED", "10.0.0.2:29500"), False),
        (ends("ESTABLISHED", "10.0.0.2:29500", send=7000), True),  # nobody takes what is sent
        (ends("ESTABLISHED", "127.0.0.1:29500", send=7000), False),
    ],
)
def test_sockets_that_do_not_get_through(seen: Rows, is_it: bool) -> None:
    found = judge(
        server(log=("Init torch distributed begin.",), stacks=STORE, seen=[*seen, *gpus(IDLE, IDLE)])
    )
    assert (found.cause == "bootstrap-network") is is_it, causes(found)
    if is_it:
        assert found.subject == "rank-1"
        assert "nc -zv 10.0.0.2 29500" in found.next_test


def test_a_hub_on_a_port_of_its_own_is_no_rank() -> None:
    variables = {"HF_ENDPOINT": "http://10.0.0.2:8800"}
    found = judge(server(log=("x",), variables=variables, seen=ends("SYN_SENT", "10.0.0.2:8800")))
    assert found.cause != "bootstrap-network"


def test_a_dead_rank_is_nearer_to_the_root_than_who_cannot_reach_it() -> None:
    alive, dead = made_up("rank-0", 100, rank=0), made_up("rank-1", 101, rank=1)
    thread = ThreadState(tid=100, name="main", state="S", cpu_s=0.0, major_faults=0)
    end = SocketEnd(protocol="tcp", inode=5, state="SYN_SENT", remote="10.0.0.2:29500", owners=("rank-0",))
    rows: list[tuple[int, str, Value]] = []
    for at in (0, 1):
        rows += [
            (at, "rank-0", ProcessState(state="S", num_threads=1)),
            (at, "rank-1", ProcessState(state="")),
        ]
        rows += [(at, "rank-0", Threads(threads=(thread,), cpu_source="schedstat"))]
        rows += [(at, RUN, Sockets(sockets=(end,)))]
    found = judge(case(target(alive, dead, engine=Engine.VLLM, expected_ranks=2), rows))
    assert (found.cause, found.condition) == ("rank-died", Condition.DEAD)


def test_one_rank_needs_no_network() -> None:
    found = judge(server(ranks=1, seen=gpus(IDLE)))
    assert "bootstrap-network" in [one.cause for one in found.excluded]


def nics(*errors: int) -> Rows:
    return [
        (i, HOST, NicCounters(ports=(NicPort(device="mlx5_0", port=1, counters={"packet_seq_err": n}),)))
        for i, n in enumerate(errors)
    ]


NODES = ("--nnodes", "2")


def test_errors_of_an_adapter_that_rise() -> None:
    seen = [*nics(10, 37), *gpus(WAITING, WAITING)]
    found = judge(
        server(engine=Engine.SGLANG, spins=True, log=("x",), stacks=DEEP_EP, arguments=NODES, seen=seen)
    )
    assert (found.cause, found.grade) == ("rdma-loss", Grade.SUPPORTED)
    assert "mlx5_0 port 1: packet_seq_err +27" in found.supports[0].text


def test_old_errors_of_an_adapter_say_nothing() -> None:
    found = judge(server(arguments=NODES, seen=[*nics(10, 10), *gpus(WAITING, WAITING)]))
    assert "rdma-loss" not in causes(found)


def test_errors_on_a_single_node_are_not_the_servers() -> None:
    found = judge(server(seen=[*nics(10, 37), *gpus(WAITING, WAITING)]))
    assert "rdma-loss" in [one.cause for one in found.excluded]


def test_a_driver_that_does_not_answer() -> None:
    silent = Failed(collector="gpus", reason="no answer within 8 s", is_timeout=True)
    found = judge(server(log=("x",), seen=[(0, HOST, silent), (1, HOST, silent)]))
    assert (found.cause, found.grade) == ("gpu-fell-off", Grade.SUPPORTED)
    assert "operator" in found.remedy


@pytest.mark.parametrize(
    ("xid", "is_device"),
    [("79, pid=1, GPU has fallen off the bus", True), ("119, pid=1, Timeout waiting for RPC from GSP", True)]
    + [("31, pid=1, MMU Fault", False), ("13, Graphics Exception", False), ("45, pid=1, Ch 00000010", False)],
)
def test_driver_errors_that_mean_the_device(xid: str, is_device: bool) -> None:
    log = KernelLog(lines=(f"NVRM: Xid (PCI:0000:41:00): {xid}",))
    found = judge(server(log=("x",), seen=[(0, HOST, log), *gpus(IDLE, IDLE)]))
    assert (found.cause == "gpu-fell-off") is is_device


def test_a_thread_asleep_in_the_driver() -> None:
    thread = ThreadState(tid=100, name="m", state="D", cpu_s=1.0, major_faults=0, wchan="uvm_spin_loop")
    rows = [(at, "rank-0", Threads(threads=(thread,), cpu_source="schedstat")) for at in (0, 1)]
    states = [(at, "rank-0", ProcessState(state="D", num_threads=1)) for at in (0, 1)]
    found = judge(case(target(made_up("rank-0", 100, rank=0), expected_ranks=1), [*rows, *states]))
    assert found.cause == "gpu-fell-off"


def test_healthy_devices_exclude_a_sick_one() -> None:
    found = judge(server(seen=gpus(IDLE, IDLE)))
    assert "gpu-fell-off" in [one.cause for one in found.excluded]


SILENT = [(1, "rank-1", ExitRecord(name="rank-1", code=1, was_told=False))]


def bound(*command: str) -> Verdict:
    people = server().target.processes
    rank = msgspec.structs.replace(people[2], command=command)
    found = target(*people[:2], rank, engine=Engine.SGLANG, expected_ranks=2)
    return judge(case(found, SILENT))


def test_a_silent_end_under_a_binding() -> None:
    found = bound("/usr/bin/numactl", "--membind=1", "python")
    assert (found.cause, found.grade) == ("numa-bind", Grade.SUPPORTED)
    assert "SGLANG_NUMA_BIND_V2=0" in found.remedy


def test_a_silent_end_without_a_binding() -> None:
    found = bound("python")
    assert found.cause == "rank-died"
    assert "numa-bind" in [one.cause for one in found.excluded]


PLACEMENT = "Waiting for creating a placement group of specs for 10 seconds. specs=[{'GPU': 1.0}]."


@pytest.mark.parametrize(
    ("arguments", "later"),
    [(("--distributed-executor-backend", "mp"), ()), ((), ("Starting to load model x",))],
)
def test_placement_is_excluded(arguments: Sequence[str], later: Sequence[str]) -> None:
    found = judge(server(log=(PLACEMENT, PLACEMENT, *later), arguments=arguments))
    assert "ray-placement" in [one.cause for one in found.excluded]


def maps(*names: str) -> Rows:
    libraries = tuple(Library(name=name, path=f"/usr/local/{name}") for name in names)
    return [(0, f"rank-{rank}", Libraries(libraries=libraries)) for rank in (0, 1)]


def test_an_interceptor_in_the_maps() -> None:
    preload = {"LD_PRELOAD": "/usr/local/vgpu/libvgpu.so"}
    found = judge(
        server(log=("x",), variables=preload, seen=[*maps("libvgpu.so", "libcuda.so.1"), *gpus(IDLE, IDLE)])
    )
    assert found.cause == "vgpu-interceptor"
    assert "libvgpu.so" in found.remedy


def test_clean_maps_exclude_an_interceptor() -> None:
    found = judge(server(log=("x",), seen=[*maps("libcuda.so.1"), *gpus(IDLE, IDLE)]))
    assert "vgpu-interceptor" in [one.cause for one in found.excluded]


BATCH = "[2026-11-29 21:10:0{n} TP0] Decode batch. #running-req: 1, accept len: {length}, gen throughput: 60"


@pytest.mark.parametrize(("length", "is_it"), [("1.00", True), ("2.61", False)])
def test_drafts_that_are_never_accepted(length: str, is_it: bool) -> None:
    lines = [BATCH.format(n=n, length=length) for n in range(5)]
    speculates = ("--speculative-algorithm", "EAGLE")
    found = judge(server(engine=Engine.SGLANG, log=lines, arguments=speculates, seen=gpus(WAITING, WAITING)))
    assert ("drafter-mismatch" in causes(found)) is is_it
    assert ("drafter-mismatch" in [one.cause for one in found.excluded]) is not is_it


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model_path='m', speculative_algorithm=None, "
        "speculative_draft_model_path=None)",
        "Initializing a V1 LLM engine (v0.33.0) with config: model='m', speculative_config=None, "
        "tokenizer='m'",
    ],
)
def test_nothing_asks_for_a_drafter(line: str) -> None:
    found = judge(server(log=(line,)))
    (veto,) = [one for one in found.excluded if one.cause == "drafter-mismatch"]
    assert "the log says None" in veto.because[0].text
    assert veto.because[0].evidence
