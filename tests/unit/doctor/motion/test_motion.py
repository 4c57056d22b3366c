"""Motion: slow is not stuck, busy is not spinning, idle is healthy; made-up looks and real children."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import pytest

from firstlight.base.blackbox.reader import NO_PLACE, Odometer, Place
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import HOST, RUN, Role
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_host import (
    Compiler,
    Compilers,
    Generation,
    Gpu,
    Gpus,
    HttpProbe,
    RequestLoad,
)
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    InputOutput,
    LogTail,
    ProcessState,
    Threads,
    ThreadState,
)
from firstlight.doctor.collect.process_state import INPUT_OUTPUT, STATE
from firstlight.doctor.collect.threads import THREADS
from firstlight.doctor.collect.tree import COMPILERS
from firstlight.doctor.motion.motion import State, Thresholds, judge_motion
from firstlight.doctor.servers.procfs import ProcFs
from support.case_rows import busy, one_rank
from support.doctor_scenes import box, case, child, in_state, living, look, made_up, target, until

RANK = made_up("rank-0", 10, rank=0)
UP = HttpProbe(url="/health", address="127.0.0.1", outcome="answered", status=200)


def looks(
    *, key: str = "rank-0", cpu_s: float = 0.0, faults: int = 0, read_bytes: int = 0, state: str = "S"
) -> list[tuple[int, str, Value]]:
    """Two looks at a process, two seconds apart; the numbers are what was added between them."""
    seen: list[tuple[int, str, Value]] = []
    for number in (0, 1):
        thread = ThreadState(
            tid=10, name="x", state=state, cpu_s=5 + number * cpu_s, major_faults=number * faults
        )
        seen += [
            (number, key, ProcessState(state=state, major_faults=100 + number * faults, num_threads=1)),
            (number, key, Threads(threads=(thread,), cpu_source="schedstat")),
            (number, key, InputOutput(rchar=0, wchar=0, read_bytes=number * read_bytes, write_bytes=0)),
        ]
    return seen


def boxes(first: dict[str, Any], second: dict[str, Any], age_s: float = 0.0) -> list[tuple[int, str, Value]]:
    return [
        (number, "rank-0", BlackBoxSeen(path="/x", box=box(**fields), is_alive=True, age_s=age_s))
        for number, fields in enumerate((first, second))
    ]


def judged(*seen: tuple[int, str, Value]) -> State:
    motion = judge_motion(case(target(RANK), seen))
    own = motion.of("rank-0")
    assert own is not None
    assert motion.state is own.state
    assert own.reasons
    assert all(motion_id.startswith("E") for motion_id in own.evidence)
    return own.state


def test_nothing_moves() -> None:
    assert judged(*looks()) is State.BLOCKED
    assert judged(*looks(state="D")) is State.BLOCKED
    assert judged(*looks(cpu_s=0.4)) is State.UNCLEAR


@pytest.mark.parametrize(
    ("added", "state"),
    [
        ({"read_bytes": 400_000_000}, State.MOVING),
        ({"read_bytes": 2_000_000}, State.SLOW),
        ({"faults": 500}, State.SLOW),
        ({"faults": 1}, State.BLOCKED),
        ({"read_bytes": 2_000}, State.BLOCKED),
        ({"faults": 500, "read_bytes": 400_000_000}, State.MOVING),
        ({"faults": 500, "cpu_s": 1.9}, State.SLOW),
    ],
)
def test_reads_and_faults(added: dict[str, Any], state: State) -> None:
    assert judged(*looks(**added)) is state


def test_the_odometer_against_its_own_average() -> None:
    """100 s in the phase: 50 units a second on average, in two seconds 100."""

    def layers(done: int) -> dict[str, Any]:
        return {"phase": "prepare", "odometer": Odometer(done, 10_000, "layers")}

    assert judged(*looks(), *boxes(layers(5000), layers(5100))) is State.MOVING
    assert judged(*looks(), *boxes(layers(5000), layers(5002))) is State.SLOW
    assert judged(*looks(), *boxes(layers(5000), layers(5000))) is State.BLOCKED
    trickle = [{"odometer": Odometer(done, 10**9, "bytes")} for done in (1000, 3_000_000)]
    assert judged(*looks(), *boxes(*trickle)) is State.SLOW
    assert judged(*looks(), *boxes({"number": 3}, {"number": 4, "phase": "kv"})) is State.MOVING


def test_compilers_are_slow_and_healthy() -> None:
    def compilers(cpu_s: float) -> Compilers:
        return Compilers(running=(Compiler(pid=7, name="cicc", cpu_s=cpu_s, parent="rank-0"),))

    assert judged(*looks(), (0, RUN, compilers(1)), (1, RUN, compilers(2.5))) is State.SLOW
    assert judged(*looks(), (0, RUN, compilers(1)), (1, RUN, compilers(1))) is State.BLOCKED


def test_busy_becomes_spinning_when_it_lasts() -> None:
    log = LogTail(path="/log", size_bytes=1, modified_wall_s=1000.0, lines=("100%",))
    old = msgspec.structs.replace(log, modified_wall_s=900.0)
    assert judged(*looks(cpu_s=1.9), (1, RUN, log)) is State.MOVING
    assert judged(*looks(cpu_s=1.9), (1, RUN, old)) is State.SPINNING
    found = case(target(RANK), looks(cpu_s=1.9))
    assert judge_motion(found, quiet_s={"rank-0": 61.0}).state is State.SPINNING
    assert judge_motion(found, Thresholds(spin_after_s=1.0)).state is State.SPINNING


def test_serving_native() -> None:
    serving = {"phase": "serving"}
    asked = {"phase": "serving", "requests": (1, 2)}
    assert judged(*looks(), *boxes(serving, serving, age_s=500)) is State.IDLE
    assert judged(*looks(), *boxes(asked, asked, age_s=500)) is State.BLOCKED
    assert judged(*looks(), *boxes(serving, asked)) is State.IDLE, "it came only with the second look"
    assert judged(*looks(cpu_s=0.1), *boxes(serving, serving)) is State.IDLE
    assert judged(*looks(cpu_s=1.9), *boxes(asked, {**asked, "step": 40})) is State.MOVING
    assert judged(*looks(cpu_s=1.9), *boxes(asked, asked, age_s=6)) is State.SPINNING


def test_a_long_step_that_goes_through_its_operators_does_not_spin() -> None:
    asked = {"phase": "serving", "requests": (1, 0), "operator": Place("attention", 2)}
    further = {**asked, "operator": Place("gate_up", 7)}
    assert judged(*looks(cpu_s=1.9), *boxes(asked, further, age_s=60)) is State.MOVING
    assert judged(*looks(cpu_s=1.9), *boxes(asked, asked, age_s=60)) is State.SPINNING
    none = {**asked, "operator": NO_PLACE}
    assert judged(*looks(cpu_s=1.9), *boxes(none, further, age_s=60)) is State.SPINNING


def test_on_a_crowded_machine_busy_may_last_longer() -> None:
    asked = {"phase": "serving", "requests": (1, 0)}
    threads = [
        Threads(threads=(thread,), cpu_source="schedstat")
        for thread in (_crowded(5.0, 0.0), _crowded(5.5, 1.5))
    ]
    seen = [(n, "rank-0", value) for n, value in enumerate(threads)]
    alone = [one for one in looks(cpu_s=0.5) if not isinstance(one[2], Threads)]
    assert judged(*alone, *seen, *boxes(asked, asked, age_s=7)) is State.MOVING
    assert judged(*alone, *seen, *boxes(asked, asked, age_s=30)) is State.SPINNING


def _crowded(cpu_s: float, queued_s: float) -> ThreadState:
    return ThreadState(tid=10, name="x", state="R", cpu_s=cpu_s, queued_s=queued_s, major_faults=0)


def test_serving_foreign() -> None:
    assert judged(*looks(), (0, RUN, UP)) is State.IDLE
    load = RequestLoad(url="/metrics", running=1, waiting=0)
    assert judged(*looks(), (0, RUN, UP), (0, RUN, load)) is State.BLOCKED
    no_token = Generation(url="/x", has_token=False, status=None, seconds=10, note="silent")
    assert judged(*looks(), (0, RUN, UP), (0, RUN, no_token)) is State.BLOCKED


@pytest.mark.parametrize(
    ("state", "expected"), [("T", State.STOPPED), ("t", State.STOPPED), ("Z", State.ZOMBIE), ("", State.DEAD)]
)
def test_the_fate_of_one_rank_is_that_of_the_server(state: str, expected: State) -> None:
    other = made_up("rank-1", 11, rank=1)
    seen = [*looks(read_bytes=10**9), (1, "rank-1", ProcessState(state=state, num_threads=1))]
    motion = judge_motion(case(target(RANK, other, expected_ranks=2, expected_from="--tp"), seen))
    assert motion.state is expected
    assert [one.key for one in motion.with_state(expected)] == ["rank-1"]
    assert motion.living_ranks == (2 if expected is State.STOPPED else 1)
    assert "rank-1" in motion.reasons[0]


def test_a_rank_known_by_its_box_only() -> None:
    dead = BlackBoxSeen(path="/x", box=box(1), is_alive=False)
    motion = judge_motion(case(target(RANK), [*looks(), (1, "rank-1", dead)]))
    own = motion.of("rank-1")
    assert own is not None
    assert (own.state, own.rank, own.role) == (State.DEAD, 1, Role.RANK)
    assert motion.state is State.DEAD


def test_one_rank_that_waits_while_another_loads_is_no_trouble() -> None:
    other = made_up("rank-1", 11, rank=1)
    seen = [*looks(), *looks(key="rank-1", read_bytes=10**9)]
    motion = judge_motion(case(target(RANK, other), seen))
    assert [one.state for one in motion.processes] == [State.BLOCKED, State.MOVING]
    assert motion.state is State.MOVING


def test_processes_that_only_wait_do_not_decide() -> None:
    launcher = made_up("launcher", 9, Role.LAUNCHER)
    seen = [*looks(cpu_s=1.9), *looks(key="launcher")]
    motion = judge_motion(case(target(RANK, launcher), seen), Thresholds(spin_after_s=1))
    assert motion.state is State.SPINNING


def test_the_api_counts_turns_of_its_loop_which_are_life_and_no_progress() -> None:
    api = made_up("api", 9, Role.API)
    up = [*looks(), *boxes({"phase": "serving"}, {"phase": "serving"})]

    def turns(*steps: int) -> list[tuple[int, str, Value]]:
        seen = (BlackBoxSeen(path="/y", box=box(None, step=step), is_alive=True) for step in steps)
        return [(number, "api", value) for number, value in enumerate(seen)]

    alive = judge_motion(case(target(api, RANK), [*up, *looks(key="api"), *turns(10, 30)]))
    assert (alive.state, alive.processes[0].progress) == (State.IDLE, ())
    asked = boxes(*[{"phase": "serving", "requests": (1, 0)}] * 2)
    waits = judge_motion(case(target(api, RANK), [*looks(), *asked, *looks(key="api"), *turns(10, 30)]))
    assert [one.state for one in waits.processes] == [State.IDLE, State.BLOCKED]
    stuck = judge_motion(case(target(api, RANK), [*up, *looks(key="api"), *turns(10, 10)]))
    assert stuck.processes[0].state is State.BLOCKED
    assert stuck.state is State.BLOCKED


def test_who_only_watches_is_never_blocked() -> None:
    watcher = made_up("supervisor", 9, Role.SUPERVISOR)
    motion = judge_motion(case(target(watcher, RANK), [*looks(), *looks(key="supervisor")]))
    assert [one.state for one in motion.processes] == [State.IDLE, State.BLOCKED]
    assert motion.state is State.BLOCKED


def test_nothing_was_found_and_one_look_only() -> None:
    assert judge_motion(Case(target=target())).state is State.DEAD
    one = [item for item in looks() if item[0] == 0]
    assert judge_motion(case(target(RANK), one)).state is State.UNCLEAR


def test_real_children() -> None:
    sleeps = "import time; print('up', flush=True); time.sleep(60)"
    spins = "print('up', flush=True)\nwhile True: pass"
    with (
        child(sleeps, ready="up") as sleeper,
        child(spins, ready="up") as spinner,
        child(spins, ready="up") as stopped,
    ):
        until(in_state(sleeper.pid, "S"))
        os.kill(stopped.pid, signal.SIGSTOP)
        until(in_state(stopped.pid, "T"))
        people = [living(one.pid, f"rank-{n}", rank=n) for n, one in enumerate((sleeper, spinner, stopped))]
        collectors = [STATE, THREADS, INPUT_OUTPUT, COMPILERS]
        found = look(target(*people), collectors, num_looks=2, interval_s=1.0)
        assert ProcFs().is_same(stopped.pid, people[2].start_ticks)
    bounds = Thresholds(spin_after_s=0.5, spinning_cores=0.1)  # other work may share the cores
    states = [motion.state for motion in judge_motion(found, bounds).processes]
    assert states == [State.BLOCKED, State.SPINNING, State.STOPPED]


def test_gpus_that_all_compute_are_progress() -> None:
    rows = busy("rank-0", 10)
    for number in (0, 1):
        gpu = Gpu(
            index=0,
            name="H",
            utilization_percent=100,
            memory_utilization_percent=40,
            power_w=500.0,
            power_limit_w=700.0,
            energy_mj=number * 1_000_000,
            process_bytes={10: 1 << 34},
        )
        rows.append((number, HOST, Gpus(gpus=(gpu,))))
    found = judge_motion(one_rank(rows), Thresholds(), {"rank-0": 500.0}).of("rank-0")
    assert found is not None
    assert found.state is State.MOVING
    assert [item.what for item in found.progress] == ["GPU work"]
