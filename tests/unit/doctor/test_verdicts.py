"""Verdicts on made-up cases: each cause that needs no GPU is the first one where its evidence stands.

What processes really look like in these troubles is tested by the patients; here it is the rules, one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from firstlight.base.blackbox.reader import Odometer
from firstlight.base.phases import DEVICE, DRAFTER, KV, PREPARE, READY, RENDEZVOUS, SELF_TEST, WEIGHTS
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN, Engine, Role
from firstlight.doctor.case.values_host import (
    HttpProbe,
)
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    LogTail,
    ProcessState,
)
from firstlight.doctor.finding import Verdict
from firstlight.doctor.hypotheses.registry import HYPOTHESES
from firstlight.doctor.hypothesis import Condition, Grade
from firstlight.doctor.verdict import judge
from support import troubled_cases as troubled
from support.case_rows import Rows, asleep, both, boxed, busy, log, one_rank, stack
from support.doctor_scenes import box, case, made_up, target


@pytest.mark.parametrize(
    ("made", "cause", "grade", "subject", "condition"),
    [
        (troubled.stopped, "process-stopped", Grade.PROVED, "rank-1", Condition.STUCK),
        (troubled.killed_for_memory, "oom-killed", Grade.PROVED, "rank-1", Condition.DEAD),
        (troubled.killed_for_memory_by_the_kernels_log, "oom-killed", Grade.PROVED, "rank-1", Condition.DEAD),
        (troubled.killed_by_somebody, "rank-died", Grade.PROVED, "rank-1", Condition.DEAD),
        (troubled.refused_memory, "memory-limit", Grade.PROVED, "rank-0", Condition.DEAD),
        (troubled.zombie, "rank-died", Grade.PROVED, "rank-1", Condition.DEAD),
        (troubled.absent, "rendezvous-missing", Grade.SUPPORTED, "rank-1", Condition.STUCK),
        (troubled.desync, "collective-desync", Grade.SUPPORTED, "rank-1", Condition.STUCK),
        (troubled.deadlock, "deadlock", Grade.PROVED, "api", Condition.STUCK),
        (troubled.file_lock, "file-lock-held", Grade.PROVED, "rank-0", Condition.STUCK),
        (troubled.full_pipe, "pipe-full", Grade.PROVED, "rank-0", Condition.STUCK),
        (troubled.locked_threads, "lock-deadlock", Grade.SUPPORTED, "rank-0", Condition.STUCK),
        (troubled.gil, "gil-held", Grade.PROVED, "rank-0", Condition.STUCK),
        (troubled.spins, "spinning", Grade.SUPPORTED, "rank-0", Condition.STUCK),
        (troubled.compiling, "jit-compiling", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.waits_for_a_build, "jit-compiling", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.stale_lock, "stale-jit-lock", Grade.PROVED, "rank-0", Condition.STUCK),
        (troubled.killed_compiler, "jit-killed", Grade.PROVED, "rank-0", Condition.DEAD),
        (troubled.slow_disk, "slow-weights", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.waits_for_a_disk, "slow-weights", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.dead_mount, "storage-silent", Grade.PROVED, "rank-0", Condition.STUCK),
        (troubled.slow_mount, "slow-weights", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.mount_that_trickles, "slow-weights", Grade.SUPPORTED, "rank-0", Condition.SLOW),
        (troubled.thrashes, "page-cache-thrash", Grade.SUPPORTED, None, Condition.SLOW),
        (troubled.truncated, "checkpoint-damaged", Grade.PROVED, None, Condition.DEAD),
        (troubled.downloading, "hub-download", Grade.SUPPORTED, "supervisor", Condition.STUCK),
        (troubled.starved, "processor-starved", Grade.SUPPORTED, None, Condition.SLOW),
        (troubled.port_taken, "port-taken", Grade.PROVED, None, Condition.STUCK),
        (troubled.proxy, "proxy-in-the-way", Grade.SUPPORTED, None, Condition.STUCK),
        (troubled.out_of_files, "process-limit", Grade.SUPPORTED, "rank-0", Condition.STUCK),
        (troubled.small_shm, "shm-too-small", Grade.SUPPORTED, "rank-0", Condition.DEAD),
        (troubled.green, "green-not-serving", Grade.SUPPORTED, "rank-0", Condition.STUCK),
        (troubled.hidden, "hidden-process", Grade.SUSPECTED, "rank-0", Condition.STUCK),
    ],
)
def test_the_first_verdict(
    made: Callable[[], Case], cause: str, grade: Grade, subject: str | None, condition: Condition
) -> None:
    verdict = judge(made())
    assert verdict.cause == cause, (verdict.summary, [other.cause for other in verdict.others])
    assert (verdict.grade, verdict.subject, verdict.condition) == (grade, subject, condition)
    assert_is_whole(verdict, made())


def test_who_waits_for_storage_does_not_hold_the_interpreter() -> None:
    verdict = judge(troubled.dead_mount(owns_gil=True))
    assert verdict.cause == "storage-silent"
    assert "gil-held" not in [other.cause for other in verdict.others]


def assert_is_whole(verdict: Verdict, seen: Case) -> None:
    """What every verdict owes: evidence that exists, a sentence, a test and a remedy without open fields."""
    assert verdict.summary.endswith(".")
    assert verdict.supports
    for clue in (*verdict.supports, *verdict.contradicts):
        assert clue.evidence, clue.text
        assert all(seen.by_id(one) is not None for one in clue.evidence), clue
    assert verdict.next_test
    for remedy in (verdict.remedies.native, verdict.remedies.vllm, verdict.remedies.sglang):
        assert remedy
        assert "{" not in remedy.replace("{{", "")


def test_an_idle_server_is_healthy() -> None:
    verdict = judge(one_rank(asleep("rank-0", 10), boxed("rank-0", 0, phase="serving")))
    assert (verdict.condition, verdict.cause) == (Condition.HEALTHY, "idle")


def test_a_server_at_work_is_healthy() -> None:
    rows: Rows = []
    for look in (0, 1):
        seen = BlackBoxSeen(
            path="b", box=box(0, phase="serving", step=look * 9, requests=(1, 0)), is_alive=True
        )
        rows.append((look, "rank-0", seen))
    verdict = judge(one_rank(busy("rank-0", 10), rows))
    assert (verdict.condition, verdict.cause) == (Condition.HEALTHY, "working")


def test_a_start_that_moves_is_on_its_way() -> None:
    rows: Rows = []
    for look in (0, 1):
        seen = BlackBoxSeen(
            path="b", box=box(0, phase="build", odometer=Odometer(look, 9, "layers")), is_alive=True
        )
        rows.append((look, "rank-0", seen))
    verdict = judge(one_rank(busy("rank-0", 10), rows))
    assert (verdict.condition, verdict.cause) == (Condition.STARTING, "on-its-way")


def test_a_server_whose_port_is_deaf_is_stuck() -> None:
    silent = HttpProbe(url="http://h/health", address="127.0.0.1", outcome="silent")
    verdict = judge(one_rank(asleep("rank-0", 10), boxed("rank-0", 0, phase="serving"), both(RUN, silent)))
    assert verdict.condition is Condition.STUCK


def test_one_look_decides_nothing() -> None:
    verdict = judge(one_rank([(0, "rank-0", ProcessState(state="S"))], boxed("rank-0")[:1]))
    assert (verdict.condition, verdict.cause) == (Condition.UNCLEAR, "unknown")
    assert verdict.decisive


def test_what_cannot_be_explained_is_unknown_and_says_where() -> None:
    frames = stack("rank-0", ("engine/worker/rank_loop.py", "mystery", "do()"))
    verdict = judge(one_rank(asleep("rank-0", 10), frames, boxed("rank-0", 0, phase="kv")))
    assert (verdict.condition, verdict.cause, verdict.subject) == (Condition.STUCK, "unknown", "rank-0")
    assert "mystery" in verdict.summary
    assert "in phase kv" in verdict.summary


def test_a_root_comes_before_its_proved_consequence() -> None:
    verdict = judge(troubled.small_shm())
    assert [other.cause for other in verdict.others][:1] == ["rank-died"]


def test_a_line_of_the_log_that_was_overcome_is_no_verdict() -> None:
    verdict = judge(
        one_rank(
            asleep("rank-0", 10), boxed("rank-0", 0, phase="serving"), log("OSError: Too many open files")
        )
    )
    assert verdict.condition is Condition.HEALTHY


def test_the_causes_are_unique_and_their_cards_complete() -> None:
    causes = [hypothesis.card.cause for hypothesis in HYPOTHESES]
    assert len(causes) == len(set(causes))
    for hypothesis in HYPOTHESES:
        card = hypothesis.card
        assert card.title, card.cause
        assert card.signs, card.cause
        assert card.next_test, card.cause
        assert card.remedies.native, card.cause
        assert card.remedies.vllm, card.cause
        assert card.remedies.sglang, card.cause


def test_the_rank_that_the_log_has_not_heard_of_is_named() -> None:
    """`Load weight end` from 5 of 8 ranks, and then silence: the answer stands in the log."""
    lines = [
        f"[2026-01-10 10:00:0{rank} TP{rank}] Load weight end. type=Llama, avail mem=9 GB"
        for rank in range(5)
    ]
    size = sum(len(line) + 1 for line in lines)
    log_seen = LogTail(path="x.log", size_bytes=size, modified_wall_s=800.0, lines=tuple(lines))
    command = ("python", "-m", "sglang.launch_server", "--tp", "8")
    launcher = msgspec.structs.replace(made_up("launcher", 9, Role.LAUNCHER), command=command)
    ranks = [made_up(f"rank-{rank}", 10 + rank, rank=rank) for rank in range(8)]
    rows = [row for rank in range(8) for row in asleep(f"rank-{rank}", 10 + rank)]
    found = target(launcher, *ranks, engine=Engine.SGLANG, expected_ranks=8)
    verdict = judge(case(found, [*rows, (0, RUN, log_seen)]))
    assert (verdict.condition, verdict.cause, verdict.subject) == (Condition.STUCK, "rank-behind", "rank-5")
    assert "not from 5, 6, 7" in verdict.summary


def ranks_in(*phases: str, engine: Engine = Engine.NATIVE) -> Verdict:
    """The verdict on ranks that sleep, each in its phase."""
    rows = [row for rank in range(len(phases)) for row in asleep(f"rank-{rank}", 10 + rank)]
    rows += [row for rank, phase in enumerate(phases) for row in boxed(f"rank-{rank}", rank, phase=phase)]
    found = [made_up(f"rank-{rank}", 10 + rank, rank=rank) for rank in range(len(phases))]
    return judge(case(target(*found, engine=engine, expected_ranks=len(phases)), rows))


@pytest.mark.parametrize(
    ("phases", "subject"),
    [
        ((DRAFTER, PREPARE), "rank-0"),  # seen: rank 1 was named, which only waits for rank 0
        ((DRAFTER, WEIGHTS), "rank-0"),
        ((SELF_TEST, READY), "rank-0"),
        ((PREPARE, DRAFTER), "rank-1"),
        ((KV, WEIGHTS), "rank-1"),
        ((WEIGHTS, DEVICE), "rank-1"),
    ],
)
def test_who_is_behind_is_told_by_the_order_of_a_start(phases: tuple[str, str], subject: str) -> None:
    verdict = ranks_in(*phases)
    assert (verdict.cause, verdict.subject) == ("rank-behind", subject)


def test_an_unknown_phase_is_neither_behind_nor_ahead() -> None:
    assert ranks_in("of-another-version", PREPARE).cause != "rank-behind"
    verdict = ranks_in("of-another-version", PREPARE, KV)
    assert (verdict.cause, verdict.subject) == ("rank-behind", "rank-1")


def test_the_order_of_a_foreign_engine_is_its_own() -> None:
    """vLLM takes its device before the rendezvous, and loads its drafter after the weights."""
    assert ranks_in(RENDEZVOUS, DEVICE, engine=Engine.VLLM).subject == "rank-1"
    assert ranks_in(DRAFTER, WEIGHTS, engine=Engine.VLLM).subject == "rank-1"
