"""Made-up cases of servers on GPUs: nobody here has eight of them, so their evidence is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import HOST, RUN, Engine, Role
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_host import Gpu, Gpus, NcclRas, RasCommunicator, RasCount
from firstlight.doctor.case.values_process import (
    Environment,
    Frame,
    LogTail,
    ProcessState,
    PythonStacks,
    StackThread,
    Threads,
    ThreadState,
)
from support.doctor_scenes import case, made_up, target

LOOKS_S = 2.0
LIMIT_W = 700.0
COMMANDS = {
    Engine.VLLM: ("vllm", "serve", "some/model"),
    Engine.SGLANG: ("python", "-m", "sglang.launch_server", "--model-path", "some/model"),
    Engine.NATIVE: ("firstlight", "serve", "some/model", "--device", "cuda"),
}
# utilisation in %, of the memory in %, watts
IDLE, WAITING, COMPUTING = (0, 0, 70.0), (100, 0, 125.0), (100, 60, 620.0)
SPINS_IN = {"torch/cuda/streams.py:synchronize": 241}


def gpus(
    *loads: tuple[int, int, float], ranks: bool = True, **fields: object
) -> list[tuple[int, str, Value]]:
    """Two looks at GPUs with these loads; each belongs to the rank of its number."""
    looks: list[tuple[int, str, Value]] = []
    for look in (0, 1):
        rows = [
            msgspec.structs.replace(
                Gpu(
                    index=index,
                    name="NVIDIA RTX PRO 6000",
                    utilization_percent=used,
                    memory_utilization_percent=memory,
                    memory_used_bytes=80 << 30,
                    memory_total_bytes=96 << 30,
                    power_w=watts,
                    power_limit_w=LIMIT_W,
                    energy_mj=int(1e9 + look * LOOKS_S * watts * 1000),
                    process_bytes={100 + index: 79 << 30} if ranks else {},
                ),
                **fields,
            )
            for index, (used, memory, watts) in enumerate(loads)
        ]
        looks.append((look, HOST, Gpus(gpus=tuple(rows), driver="570.1", driver_cuda="12.8")))
    return looks


def ras(*counts: int) -> list[tuple[int, str, Value]]:
    """Two equal answers of RAS; without counts it reports no difference."""
    rows = tuple(RasCount(operation="collective", num_ranks=1, launched=count) for count in counts)
    unequal = (RasCommunicator(name="#0-0 (abc)", status="MISMATCH", counts=rows),) if rows else ()
    value = NcclRas(address="127.0.0.1:28028", protocol="SERVER PROTOCOL 2", communicators=unequal)
    return [(look, RUN, value) for look in (0, 1)]


def stack(*frames: str) -> PythonStacks:
    """`file:function`, innermost first."""
    parts = [frame.rpartition(":") for frame in frames]
    rows = tuple(Frame(function=function, file=file, line=10) for file, _, function in parts)
    thread = StackThread(tid=1, name="MainThread", is_active=False, owns_gil=False, frames=rows)
    return PythonStacks(threads=(thread,), tool="py-spy")


def server(
    *,
    engine: Engine = Engine.VLLM,
    ranks: int = 2,
    moves: bool = False,
    spins: bool = False,
    log: Sequence[str] = (),
    stacks: Mapping[int, PythonStacks] | PythonStacks | None = None,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    seen: Sequence[tuple[int, str, Value]] = (),
) -> Case:
    """A server whose ranks sleep, spin (a core busy for ten minutes) or are known to be alive only."""
    people = [made_up(f"rank-{rank}", 100 + rank, rank=rank) for rank in range(ranks)]
    api = msgspec.structs.replace(
        made_up("api", 90, Role.API), command=(*COMMANDS.get(engine, ("python",)), *arguments)
    )
    rows: list[tuple[int, str, Value]] = []
    for look in (0, 1):
        for one in (api, *people):
            busy_s = look * LOOKS_S if (spins or moves) and one is not api else 0.0
            thread = ThreadState(tid=one.pid, name="main", state="S", cpu_s=busy_s, major_faults=0)
            rows.append((look, one.key, ProcessState(state="S", cpu_s=busy_s, num_threads=1)))
            rows.append((look, one.key, Threads(threads=(thread,), cpu_source="schedstat")))
        if log:
            age_s = 0.5 if moves else 600.0
            tail = LogTail(path="/log", size_bytes=1, modified_wall_s=1000 - age_s, lines=tuple(log))
            rows.append((look, RUN, tail))
    for rank in range(ranks):
        found = stacks if isinstance(stacks, PythonStacks) else (stacks or {}).get(rank)
        if found is not None:
            rows.append((1, f"rank-{rank}", found))
    if variables is not None:
        rows.append((0, "rank-0", Environment(variables=dict(variables))))
    people_found = target(api, *people, engine=engine, expected_ranks=ranks, expected_from="the options")
    return case(people_found, [*rows, *seen], LOOKS_S)
